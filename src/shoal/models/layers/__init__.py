"""Layers that the models are built from: attention, experts, embeddings, memory."""
