"""fp8 and nvfp4 matrix products, real and emulated."""
