"""Export of trained models for other programs."""

GGUF_TYPES = {"f32": "ALL_F32", "f16": "MOSTLY_F16", "bf16": "MOSTLY_BF16", "q8_0": "MOSTLY_Q8_0", "q4_0": "MOSTLY_Q4_0"}
"""The types of the matrices of a GGUF file, with the names that the package gguf gives such files."""
