"""The networks that are trained, and how language models write."""

from shoal.models.build import build
from shoal.models.data_shapes import Shapes
from shoal.models.generation.generate import generate
from shoal.models.generation.side_texts import ReadBeside, read_beside

__all__ = ["ReadBeside", "Shapes", "build", "generate", "read_beside"]
