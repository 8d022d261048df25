"""The sources of text: open the parts that a run's source is made of."""

from __future__ import annotations

from pathlib import Path

from shoal.config import Run
from shoal.config.schema.data import Builtin, DataSource, HubDataset, Mixture, Snli, Text, Wikitext
from shoal.data.hub.dataset import Request, open_dataset
from shoal.data.text.documents import TextPart, Unit
from shoal.data.text.files import open_text
from shoal.data.text.python_source import python_source
from shoal.data.text.snli import open_snli
from shoal.data.text.wikitext import open_wikitext
from shoal.errors import ShoalError


def open_parts(source: DataSource, run: Run, request: Request) -> list[TextPart]:
    """One part; several of a mixture, or of a folder of texts that is to be mixed."""
    unit: Unit = "line" if run.data.batching != "packed" else "piece" if run.data.streaming else "whole"
    if isinstance(source, Mixture):
        return [_open(part.source, request, unit)._replace(weight=part.weight) for part in source.parts]
    if isinstance(source, Text):
        return open_text(Path(source.path).expanduser(), source.text_field, unit, mixed=run.data.mixing.enabled)
    return [_open(source, request, unit)]


def _open(source: DataSource, request: Request, unit: Unit) -> TextPart:
    if isinstance(source, Text):
        return open_text(Path(source.path).expanduser(), source.text_field, unit, mixed=False)[0]
    if isinstance(source, HubDataset):
        return open_dataset(source, request._replace(name=source.name))
    if isinstance(source, Wikitext):
        return open_wikitext(source, request, unit)
    if isinstance(source, Snli):
        return open_snli(source, request)
    if isinstance(source, Builtin) and source.name == "python-source":
        return python_source()
    raise ShoalError(f"data.source: `{getattr(source, 'name', source.kind)}` is not a text")
