"""The networks that are trained, and how language models write."""

from shoal.models.build import build
from shoal.models.generate import generate
from shoal.models.reading import ReadBeside, read_beside
from shoal.models.shapes import Shapes

__all__ = ["ReadBeside", "Shapes", "build", "generate", "read_beside"]
