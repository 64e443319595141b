"""What was found, as one page or Markdown."""
