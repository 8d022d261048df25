"""The Hugging Face hub: whether it answers, its data sets, and copies of their files."""
