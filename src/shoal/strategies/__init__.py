"""Between workers: how updates become new weights. One small file each."""
