"""Matrices in 16, 8 or 4 bits, which stay packed while the model computes: formats, products and layers."""
