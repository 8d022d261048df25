"""The networks that are trained, and text generation."""

from shoal.models.build import build
from shoal.models.generation.generate import generate
from shoal.models.generation.side_texts import SideTexts, make_side_texts

__all__ = ["SideTexts", "build", "generate", "make_side_texts"]
