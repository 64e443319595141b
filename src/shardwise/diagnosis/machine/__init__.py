"""One machine: facts observed once, and what they mean for a job."""
