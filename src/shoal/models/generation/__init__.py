"""Text generation: decoding, KV cache, batched sampling."""
