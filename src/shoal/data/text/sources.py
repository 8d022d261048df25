"""The sources of text: each opens its parts, which are then encoded, mixed or streamed."""

from __future__ import annotations

from pathlib import Path

from shoal.config import Run
from shoal.config.schema.data import HubDataset, Mixing, Mixture, Preferences, Snli, Text, Wikitext
from shoal.data.hub.dataset import DataRequest, open_dataset
from shoal.data.text.documents import TextPart, Unit
from shoal.data.text.files import open_text
from shoal.data.text.rows import Fields
from shoal.data.text.snli import open_snli
from shoal.data.text.wikitext import open_wikitext
from shoal.errors import ShoalError


def unit_of(run: Run) -> Unit:
    """The unit that plain text files are cut into."""
    if run.data.batching != "packed" or run.data.packing == "documents":
        return "line"
    return "piece" if run.data.streaming else "whole"


def reads_context(run: Run) -> bool:
    """Whether the model has cross-attention to a context."""
    cross_attention = getattr(run.model, "cross_attention", None)
    return bool(cross_attention and cross_attention.enabled)


def expect_reader(source: Text | HubDataset | Preferences, run: Run) -> None:
    """Raises ShoalError if `context_field` is set and the model has no cross-attention."""
    if source.context_field is not None and not reads_context(run):
        raise ShoalError("data.source.context_field is read by cross-attention: set model.cross_attention.enabled, or leave it out")


def _fields(source: Text | HubDataset, run: Run) -> Fields:
    expect_reader(source, run)
    return Fields(source.text_field, source.context_field, reads_context(run))


def open_files(source: Text, run: Run, request: DataRequest) -> list[TextPart]:
    """One part, or with mixing one for each file and sub-folder of a folder."""
    return open_text(Path(source.path).expanduser(), _fields(source, run), unit_of(run), mixed=run.data.mixing.enabled)


def open_hub(source: HubDataset, run: Run, request: DataRequest) -> list[TextPart]:
    return [open_dataset(source, request._replace(name=source.name), _fields(source, run))]


def open_wiki(source: Wikitext, run: Run, request: DataRequest) -> list[TextPart]:
    return [open_wikitext(source, request, unit_of(run))]


def open_pairs(source: Snli, run: Run, request: DataRequest) -> list[TextPart]:
    return [open_snli(source, request, premise_as_context=reads_context(run))]


def open_mixture(source: Mixture, run: Run, request: DataRequest) -> list[TextPart]:
    """The parts of a mixture: one for each of its sources."""
    whole = run.replace(data=run.data.replace(mixing=Mixing(enabled=False)))
    parts: list[TextPart] = []
    for part in source.parts:
        if part.source.gives != "text":
            raise ShoalError(f"data.source: `{getattr(part.source, 'name', part.source.kind)}` is not a text")
        parts.append(part.source.builder()(part.source, whole, request)[0]._replace(weight=part.weight))
    return parts
