"""Codecs: a vector becomes frames of bytes, and frames become a vector."""
