"""The status of a run as text, for `shoal status` and `shoal top`. Its input is already sanitised (`runs/folder/run_reader.py`)."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from shoal.config.schema.updates import Privacy
from shoal.protocol.messages import PAUSED

_LOUD = ("loss", "accuracy", "perplexity", "score", "kl", "discriminator_loss", "generator_loss")

Row = tuple[str, ...]
Cells = dict[str, Callable[[Mapping[str, Any]], str]]
"""By a column's name: the text of a row in it."""


def lines(status: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """The facts about the whole run, each as a title and a text."""
    kind = status["strategy"] or "one process, no workers"
    scheduler = f", scheduler {status['scheduler']}" if status["scheduler"] != "none" else ""
    over = f" over {status['transport']}" if status["transport"] else ""
    yield "run", f"{status['run'] or status.get('folder', '')}: {kind}{over}{scheduler}"
    yield "state", _state(status)
    yield "progress", progress_of(status)
    yield "figures", figures_of(status)
    if status["contributions"]:
        yield "updates", counted(status["contributions"])
    if status["refused"]:
        yield "refused", ", ".join(f"{count} {reason}" for reason, count in status["refused"].items())
    if status["received_bytes"] or status["sent_bytes"]:
        yield "traffic", f"{in_bytes(status['received_bytes'])} received, {in_bytes(status['sent_bytes'])} sent"
    if status["privacy"]:
        yield "privacy", privacy_of(status["privacy"])
    for text in status["damaged"]:
        yield "damaged", text


def _state(status: Mapping[str, Any]) -> str:
    age = time.time() - float(status["at"] or 0.0)
    if status["state"] == "not here":
        return f"the coordinator is not here: it was last seen {duration(age)} ago (`shoal coordinate --run-dir … --resume` goes on)"
    return str(status["state"]) + (f", as of {duration(age)} ago" if age > 5 and status["at"] else "")


def progress_of(status: Mapping[str, Any]) -> str:
    """How far it is, how long it took, and how long it will take."""
    of_all = f" of {status['of']}" if status["of"] else ""
    share = f" ({status['progress']:.0%})" if status["progress"] is not None else ""
    left = f", about {duration(status['eta_s'])} left" if status["eta_s"] else ""
    return f"{status['step_name']} {status['version']}{of_all}{share}, {status['samples']:,} samples in {duration(status['wall_s'])}{left}"


def figures_of(status: Mapping[str, Any]) -> str:
    found = []
    for split in ("train", "eval"):
        values = status["figures"].get(split, {})
        if shown := [f"{name} {values[name]:.4g}" for name in _LOUD if isinstance(values.get(name), (int, float))]:
            found.append(f"{split} " + ", ".join(shown))
    return "; ".join(found) or "none yet"


def privacy_of(privacy: Mapping[str, Any]) -> str:
    spent = privacy.get("epsilon")
    if spent is None:
        return "nothing is known of ε yet"
    return f"ε = {spent:.4g} spent at δ = {privacy.get('delta', 0):g}{'' if Privacy.protects(spent) else ', too much to protect the data'}"


def member_rows(status: Mapping[str, Any]) -> list[Row]:
    """The workers, in the order of their names, those who are gone last; the columns' names first."""
    ordered = [row for key in ("members", "gone") for row in sorted(status[key], key=lambda row: str(row["worker"]))]
    return in_columns(CELLS, ordered, with_task=any("task" in row for row in status["members"]))


def in_columns(cells: Cells, rows: Sequence[Mapping[str, Any]], with_task: bool = False) -> list[Row]:
    """The columns' names, and the text of each row in them."""
    if with_task:
        cells = cells | {"task": lambda row: str(row.get("task") or "none")}
    return [tuple(cells), *(tuple(cell(row) for cell in cells.values()) for row in rows)]


def _joined(row: Mapping[str, Any]) -> str:
    return time.strftime("%H:%M:%S", time.localtime(row["since"])) if row.get("since") else "-"


def _last_seen(row: Mapping[str, Any]) -> str:
    here = row["state"] not in ("gone", "left") and not str(row["state"]).startswith(PAUSED)
    return f"{duration(row['heard_s'])} ago" if row.get("heard_s") is not None and here else "-"


def counted(counts: Mapping[str, int]) -> str:
    """Counts by outcome, as text. A unit is late if its time was over, and cancelled if its round was: people read that it was too late.
    What came when the run had finished is shown as `after the end`."""
    shown = dict[str, int]()
    for outcome, count in counts.items():
        name = {"late": "too late", "cancelled": "too late", "finished": "after the end"}.get(outcome, outcome)
        shown[name] = shown.get(name, 0) + count
    return ", ".join(f"{count} {name}" for name, count in shown.items())


def _rejected(row: Mapping[str, Any]) -> str:
    reasons = counted(row.get("why") or {})
    return f"{row['rejected']} ({reasons})" if reasons else str(row["rejected"])


def shares_of(row: Mapping[str, Any]) -> str:
    """How a worker's time divides: computing, waiting for answers, making updates ready and handing them over."""
    parts = [float(row.get(name) or 0.0) for name in ("computing_s", "waiting_s", "sending_s")]
    whole = sum(parts)
    return "/".join(f"{100 * part / whole:.0f}" for part in parts) + " %" if whole > 0 else "-"


CELLS: Cells = {
    "worker": lambda row: str(row["worker"]),
    "state": lambda row: str(row["state"]),
    "joined": _joined,
    "last seen": _last_seen,
    "address": lambda row: str(row.get("address") or "-"),
    "updates/s": lambda row: "-" if row.get("rate") is None else f"{row['rate']:.3g}",
    "lag": lambda row: str(row["lag"]),
    "accepted": lambda row: str(row["accepted"]),
    "rejected": _rejected,
    "received from": lambda row: in_bytes(row["bytes"]),
    "computing/waiting/sending": shares_of,
    "memory": lambda row: in_bytes(row["memory_bytes"]) if row.get("memory_bytes") else "-",
}


def event_lines(events: Sequence[Mapping[str, Any]], most: int) -> list[str]:
    """The last events, the newest last."""
    shown = events[-most:] if most > 0 else []
    return [f"{time.strftime('%H:%M:%S', time.localtime(one.get('at') or 0))} {one.get('text', '')}" for one in shown]


def duration(seconds: float | None) -> str:
    """A time that people can read."""
    if seconds is None:
        return "?"
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    return f"{whole // 3600} h {whole % 3600 // 60} min"


def in_bytes(count: float) -> str:
    """An amount of bytes that people can read."""
    amount, unit = float(count), "B"
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if amount < 1000 or unit == "TB":
            break
        amount /= 1000
    return f"{amount:.0f} {unit}" if unit == "B" else f"{amount:.1f} {unit}"
