"""Export of trained models for other programs."""
