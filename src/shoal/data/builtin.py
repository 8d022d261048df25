"""Data that comes with Python's own packages, so that a first run needs no files: digits, and Python's source text and Zen."""

from __future__ import annotations

from shoal.config import Run
from shoal.config.schema.data import Builtin
from shoal.data.hub.dataset import DataRequest
from shoal.data.images.digits import load_digits
from shoal.data.interfaces import Data
from shoal.data.text.documents import TextPart
from shoal.data.text.python_source import python_source, zen_of_python


def load_builtin(source: Builtin, run: Run, request: DataRequest) -> Data | list[TextPart]:
    if source.name == "digits":
        return load_digits(run)
    return [zen_of_python() if source.name == "zen" else python_source()]
