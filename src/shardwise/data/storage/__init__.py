"""Files of token sources and documents, on disk or on object storage."""
