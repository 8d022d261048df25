"""`shoal audit`: checks what a run wrote, independently of the code that wrote it."""
