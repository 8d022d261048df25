"""The networks that are trained, and how language models write."""

from shoal.models.build import build
from shoal.models.generate import ReadBeside, generate
from shoal.models.shapes import Shapes

__all__ = ["ReadBeside", "Shapes", "build", "generate"]
