"""The figures of runs in the form that Prometheus reads; and a coordinator's own, at /metrics."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

from shoal.config.schema.cluster import Coordinator
from shoal.transports.addresses import is_loopback
from shoal.transports.metrics_page import MetricsPage
from shoal.transports.private_files import write_private

_OF_RUN = {
    "version": ("gauge", "The number of the newest weights."),
    "samples": ("counter", "Samples that were learned from."),
    "wall_s": ("counter", "Seconds that the run has taken."),
    "progress": ("gauge", "How far the run is, from 0 to 1."),
    "eta_s": ("gauge", "Seconds that the run will still take, by the speed of the last minute."),
    "received_bytes": ("counter", "Bytes that the coordinator received."),
    "sent_bytes": ("counter", "Bytes that the coordinator sent."),
}
_OF_WORKER = {
    "rate": ("gauge", "Contributions a second of a worker."),
    "lag": ("gauge", "Versions that a worker's last contribution lagged."),
    "accepted": ("counter", "Contributions of a worker that were accepted since it joined."),
    "rejected": ("counter", "Contributions of a worker that were turned away since it joined."),
    "bytes": ("counter", "Bytes of a worker's contributions."),
    "heard_s": ("gauge", "Seconds since a worker was heard."),
    "computing_s": ("counter", "Seconds that a worker computed, as it says."),
    "waiting_s": ("counter", "Seconds that a worker waited for answers, as it says."),
    "sending_s": ("counter", "Seconds that a worker took to hand over updates, as it says."),
    "memory_bytes": ("gauge", "The most memory that a worker has used, as it says."),
}


@contextmanager
def shown_to_prometheus(
    settings: Coordinator, folder: Path, status: Callable[[], Mapping[str, Any]], tell: Callable[[str], None]
) -> Iterator[None]:
    """Show a coordinator's figures for as long as it takes, where the settings say so. `status`: the newest, as a file of it holds it."""
    if settings.metrics_port is None:
        yield
        return
    host, name = settings.metrics_host, folder.resolve().name
    token = None if is_loopback(host) else _token(folder / "metrics-token")
    page = MetricsPage(host, settings.metrics_port, token, lambda: exposition({name: status()}))
    with closing(page):
        tell(f"figures for Prometheus: {page.address}" + ("" if token is None else f" (token in {folder / 'metrics-token'})"))
        yield


def _token(path: Path) -> str:
    """The token of before, so that nobody has to be told a new one when the coordinator comes back."""
    if path.exists():
        return path.read_text(encoding="utf-8").strip()
    token = secrets.token_urlsafe(24)
    write_private(path, token)
    return token


def exposition(runs: Mapping[str, Mapping[str, Any]]) -> str:
    """All figures of all runs, by their names."""
    lines: list[str] = []
    for name, (kind, help) in _OF_RUN.items():
        lines += _family(name, kind, help, ((_labels(run=run), status.get(name)) for run, status in runs.items()))
    lines += _family("up", "gauge", "Whether the run is being worked at.", ((_labels(run=run), _is_up(one)) for run, one in runs.items()))
    here = ((_labels(run=run), len(one["members"]) + one["members_left_out"]) for run, one in runs.items())
    lines += _family("workers", "gauge", "Workers that are here.", here)
    for field, label, help in (
        ("contributions", "outcome", "Contributions by what became of them."),
        ("refused", "reason", "Messages that were turned away, by reason."),
    ):
        counted = ((_labels(run=run, **{label: name}), count) for run, one in runs.items() for name, count in one[field].items())
        lines += _family(field, "counter", help, counted)
    figures = (
        (_labels(run=run, split=split, figure=name), value)
        for run, one in runs.items()
        for split, several in one["figures"].items()
        for name, value in several.items()
    )
    lines += _family("figure", "gauge", "The newest value of each figure that the run records.", figures)
    for name, (kind, help) in _OF_WORKER.items():
        told = ((_labels(run=run, worker=row["worker"]), row.get(name)) for run, one in runs.items() for row in one["members"])
        lines += _family(f"worker_{name}", kind, help, told)
    return "\n".join(lines) + "\n"


def _is_up(status: Mapping[str, Any]) -> int:
    return int(status["state"] in ("running", "paused", "ending"))


def _family(name: str, kind: str, help: str, values: Iterator[tuple[str, Any]]) -> list[str]:
    full = f"shoal_{name.removesuffix('_s') + '_seconds' if name.endswith('_s') else name}" + ("_total" if kind == "counter" else "")
    shown = [f"{full}{labels} {value}" for labels, value in values if isinstance(value, (int, float)) and not isinstance(value, bool)]
    return [f"# HELP {full} {help}", f"# TYPE {full} {kind}", *shown] if shown else []


def _labels(**labels: Any) -> str:
    """Names of workers and figures are strangers' words: what would end a label early is escaped."""
    return "{" + ",".join(f'{name}="{_escaped(str(value))}"' for name, value in labels.items()) + "}"


def _escaped(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
