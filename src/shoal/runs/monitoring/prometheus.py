"""Metrics in Prometheus' text format: the one writer of it, the metrics of runs, and a coordinator's own page of them."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from shoal.config.schema.cluster import Coordinator
from shoal.files import secret_in
from shoal.transports.addresses import is_loopback
from shoal.transports.metrics_page import MetricsPage

_RUN_METRICS = {
    "version": ("gauge", "The number of the newest weights."),
    "samples": ("counter", "Samples that the run was trained on."),
    "wall_s": ("counter", "Seconds that the run has taken."),
    "progress": ("gauge", "Progress of the run, from 0 to 1."),
    "eta_s": ("gauge", "Seconds that the run will still take, by the speed of the last minute."),
    "received_bytes": ("counter", "Bytes that the coordinator received."),
    "sent_bytes": ("counter", "Bytes that the coordinator sent."),
}
_WORKER_METRICS = {
    "rate": ("gauge", "Contributions a second of a worker."),
    "lag": ("gauge", "Versions that a worker's last contribution lagged."),
    "accepted": ("counter", "Contributions of a worker that were accepted since it joined."),
    "rejected": ("counter", "Contributions of a worker that were rejected since it joined."),
    "bytes": ("counter", "Bytes of a worker's contributions."),
    "heard_s": ("gauge", "Seconds since the last message of a worker."),
    "computing_s": ("counter", "Seconds that a worker computed, as it reports."),
    "waiting_s": ("counter", "Seconds that a worker waited for answers, as it reports."),
    "sending_s": ("counter", "Seconds that a worker took to send updates, as it reports."),
    "data_s": ("counter", "Seconds that a worker waited for data, as it reports."),
    "forward_backward_s": ("counter", "Seconds of a worker's forward and backward passes, as it reports."),
    "communication_s": ("counter", "Seconds that the processes of a worker exchanged gradients, as it reports."),
    "optimizer_s": ("counter", "Seconds of a worker's optimizer, as it reports."),
    "tokens_per_s": ("gauge", "Tokens a second of the contributions of a worker that were accepted, as it reports."),
    "mfu": ("gauge", "Model FLOP utilisation of a worker's devices, as it reports."),
    "memory_bytes": ("gauge", "The most memory that a worker has used, as it reports."),
}


class MetricSample(NamedTuple):
    """One value, and the labels that tell it from the others of its metric."""

    value: Any
    labels: Mapping[str, str] = {}


class Metric(NamedTuple):
    """A metric family. Samples whose value is not a number are left out."""

    name: str
    kind: str
    """`counter` or `gauge`."""
    help: str
    samples: Iterable[MetricSample]

    def lines(self) -> list[str]:
        """Holds: empty where no sample has a value."""
        shown = [
            f"{self.name}{_labels(labels)} {value}"
            for value, labels in self.samples
            if isinstance(value, (int, float)) and not isinstance(value, bool)
        ]
        return [f"# HELP {self.name} {self.help}", f"# TYPE {self.name} {self.kind}", *shown] if shown else []


def exposition(metrics: Iterable[Metric]) -> str:
    """The text that Prometheus reads."""
    return "\n".join(line for metric in metrics for line in metric.lines()) + "\n"


def _labels(labels: Mapping[str, str]) -> str:
    """Workers choose their names, so a character that would end a label early is escaped."""
    return "{" + ",".join(f'{name}="{_escaped(value)}"' for name, value in labels.items()) + "}" if labels else ""


def _escaped(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")


@contextmanager
def metrics_page(
    settings: Coordinator, folder: Path, status: Callable[[], Mapping[str, Any]], tell: Callable[[str], None]
) -> Iterator[None]:
    """Show a coordinator's metrics while the block runs, where the settings say so. `status`: the newest content of its status file."""
    if settings.metrics_port is None:
        yield
        return
    host, name = settings.metrics_host, folder.resolve().name
    token = None if is_loopback(host) else secret_in(folder / "metrics-token", lambda: secrets.token_urlsafe(24))
    page = MetricsPage(host, settings.metrics_port, token, lambda: exposition(run_metrics({name: status()})))
    with closing(page):
        tell(f"figures for Prometheus: {page.address}" + ("" if token is None else f" (token in {folder / 'metrics-token'})"))
        yield


def run_metrics(runs: Mapping[str, Mapping[str, Any]]) -> Iterator[Metric]:
    """All metrics of runs, from their statuses by name."""
    for field, (kind, help) in _RUN_METRICS.items():
        yield Metric(_full_name(field, kind), kind, help, [MetricSample(status.get(field), {"run": run}) for run, status in runs.items()])
    working = [MetricSample(int(one["state"] in ("running", "paused", "ending")), {"run": run}) for run, one in runs.items()]
    yield Metric("shoal_up", "gauge", "Whether the run is in progress.", working)
    present = [MetricSample(len(one["members"]) + one["members_left_out"], {"run": run}) for run, one in runs.items()]
    yield Metric("shoal_workers", "gauge", "Workers that take part.", present)
    for field, label, help in (
        ("contributions", "outcome", "Contributions by outcome."),
        ("refused", "reason", "Messages that were refused, by reason."),
    ):
        counts = [MetricSample(count, {"run": run, label: name}) for run, one in runs.items() for name, count in one[field].items()]
        yield Metric(f"shoal_{field}_total", "counter", help, counts)
    yield Metric("shoal_figure", "gauge", "The newest value of each figure that the run records.", _figures(runs))
    for field, (kind, help) in _WORKER_METRICS.items():
        values = [
            MetricSample(row.get(field), {"run": run, "worker": str(row["worker"])}) for run, one in runs.items() for row in one["members"]
        ]
        yield Metric(_full_name(f"worker_{field}", kind), kind, help, values)


def _figures(runs: Mapping[str, Mapping[str, Any]]) -> Iterator[MetricSample]:
    for run, status in runs.items():
        for split, figures in status["figures"].items():
            for name, value in figures.items():
                yield MetricSample(value, {"run": run, "split": split, "figure": name})


def _full_name(field: str, kind: str) -> str:
    name = f"{field.removesuffix('_s')}_seconds" if field.endswith("_s") else field
    return f"shoal_{name}" + ("_total" if kind == "counter" else "")
