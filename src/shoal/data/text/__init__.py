"""Text in memory: where it comes from, how it becomes tokens and samples, mixtures, pairs of answers."""
