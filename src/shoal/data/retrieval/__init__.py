"""Passages that a model reads beside its input: cut from texts, kept in an index, found by likeness."""
