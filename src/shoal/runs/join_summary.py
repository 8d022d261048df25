"""What a worker was asked to do, in five lines that its user sees before it computes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from shoal.config import Run
from shoal.config.received import hub_names
from shoal.config.received.settings import local_paths
from shoal.errors import printable
from shoal.runs.live_objects import factory_names
from shoal.runs.run_size import ranks_per_worker
from shoal.scheduling.memory_estimate import training_memory

_LONGEST = 2000
"""Most characters of a line, which names what the coordinator wants."""
_LIBRARIES_GB, _TRANSFORMERS_GB = 0.27, 0.2
"""Memory of Python with PyTorch and a small task, and what transformers adds: measured with `shoal join` on a CPU."""
_COPIES = 5
"""Copies of the weights beside training: the newest ones, those a step began with, the update, the encoded update, and messages. Measured:
993 MB with syncps and 1,143 MB with diloco, for 19 million weights of which training takes 444 MB."""
_SOURCES_ON_HUB = ("wikitext", "snli")


class JoinSummary(NamedTuple):
    """The five lines."""

    model: str
    data: str
    processes: str
    memory: str
    writes: str

    def __str__(self) -> str:
        return "\n".join(f"  {name + ':':<11}{printable(text)[:_LONGEST]}" for name, text in self._asdict().items())


def summary_of(run: Run, weights: int | None, free_bytes: int | None, writes: Sequence[str], *, sent: bool = False) -> JoinSummary:
    """What these settings make this machine do. `weights`: size of the model; None: not known yet. `sent`: the coordinator sends images."""
    size = f", {weights:,} weights" if weights is not None else ""
    needed = _needed(run, weights) if weights is not None else None
    free = f"{free_bytes / 1e9:.1f} GB are free here" if free_bytes is not None else "how much is free here is not known"
    return JoinSummary(
        f"{run.model.kind}{size}; {run.chosen_task.kind}, {run.strategy.kind}",
        _data(run, sent),
        _processes(run),
        f"about {_amount(needed)} for each process; {free}" if needed is not None else free,
        "; ".join([*writes, *_written(run)]) or "nothing",
    )


def _needed(run: Run, weights: int) -> float:
    """Memory of one process of a worker, in gigabytes: its programs, training, and updates on their way."""
    libraries = _LIBRARIES_GB + (_TRANSFORMERS_GB if run.model.kind == "huggingface" else 0.0)
    training = training_memory(run, weights, getattr(run.model, "vocab_size", None) or 0).gb
    return libraries + training + _COPIES * 4 * weights / 1e9


def summary_of_node(model: Mapping[str, Any], memory_bytes: int) -> JoinSummary:
    """What a server asks of a machine that holds layers. `model`: its description."""
    own = model.get("settings")
    kind = str(own.get("kind")) if isinstance(own, Mapping) else "a model of Transformers"
    return JoinSummary(
        f"layers of {kind}, {model.get('width')} wide, which write texts",
        "none; hidden states of other people's texts pass through this machine",
        "1 on the best device here",
        f"at most {_amount(memory_bytes / 1e9)} for layers and their caches",
        "nothing",
    )


def _amount(gigabytes: float) -> str:
    return f"{gigabytes:.1f} GB" if gigabytes >= 1 else f"{1000 * gigabytes:.0f} MB"


def _data(run: Run, sent: bool) -> str:
    source = run.data.source
    kind = source.kind if source is not None else "none"
    places = [f"reads {path}" for path in local_paths(run)]
    places += [f"{name} from the hub{' with your token' if run.hub.token else ''}" for name in sorted(hub_names(run))]
    places += [f"calls {name}" for name in factory_names(run)]
    if kind in _SOURCES_ON_HUB and not places:
        places.append("from the hub")
    if sent:
        places.append("the coordinator sends the images that are not here")
    return f"{kind}; {', '.join(places) or 'built in, or sent by the coordinator'}"


def _processes(run: Run) -> str:
    each, loaders = ranks_per_worker(run), run.data.loader.num_workers
    device = "the best device here" if run.training.device == "auto" else run.training.device
    return f"{each} ({run.engine.kind}) on {device}" + (f", each with {loaders} more that load data" if loaders else "")


def _written(run: Run) -> list[str]:
    """Where the settings themselves make a worker write."""
    retrieval, source, written = getattr(run.model, "retrieval", None), run.data.source, list[str]()
    if retrieval is not None and retrieval.enabled and retrieval.index is None:
        written.append(f"an index of passages in {run.output_dir}/retrieval")
    if source is not None and (source.kind == "mnist" or getattr(source, "download", None)):
        written.append(f"downloaded data in {getattr(source, 'path', '')}, where it is missing")
    if getattr(run.engine, "nvme_offload", False):
        written.append(f"the optimizer's state in {getattr(run.engine, 'nvme_path', '')}")
    if hub_names(run) or (source is not None and source.kind in _SOURCES_ON_HUB and getattr(source, "path", None) is None):
        written.append("downloads in the cache of the hub's libraries")
    return written
