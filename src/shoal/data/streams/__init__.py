"""Streams of text, which are read during the run and never completely in memory."""
