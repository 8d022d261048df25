"""Retrieval: passages cut from texts, an index of their vectors, and the nearest passages for each chunk of the input."""
