"""Models of the Hugging Face libraries."""
