"""Updates are flat vectors: pure functions on them, each with its state in the open; and the messages that carry them."""
