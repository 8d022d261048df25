"""The workers of a class as a table: what each has done, and whether it is connected."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from shoal.config.schema.updates import Privacy
from shoal.errors import printable
from shoal.protocol.messages import PAUSED
from shoal.reporters.text_status import CELLS, Cells, in_bytes, in_columns

if TYPE_CHECKING:
    from shoal.transports.postgres.queries import RunView

_COLUMNS = ("worker", "state", "images/s", "idle", "accepted", "late", "images", "share")
_MEMBER_CELLS: Cells = {name: CELLS[name] for name in ("worker", "state", "updates/s", "lag", "accepted")} | {
    "rejected": lambda row: str(row["rejected"]),
    "received": lambda row: in_bytes(row["bytes"]),
}
_TASK_CELLS: Cells = {
    "task": lambda row: str(row["task"]),
    "worker": lambda row: str(row["worker"] or "waits"),
    "epoch": lambda row: str(row["epoch"] + 1),
    "batches": lambda row: f"{row['batches'][0]} to {row['batches'][1] - 1}",
    "done": lambda row: f"{row['done']} of {row['batches'][1] - row['batches'][0]}",
}


def member_table(members: Sequence[Mapping[str, Any]]) -> list[tuple[str, ...]]:
    """The workers of a run without units, after the columns' names; with the task of each where a scheduler gives out tasks."""
    ordered = sorted(members, key=lambda row: str(row["worker"]))
    return in_columns(_MEMBER_CELLS, ordered, with_task=any("task" in row for row in members))


def task_table(tasks: Sequence[Mapping[str, Any]]) -> list[tuple[str, ...]]:
    """Pieces of tasks that are not done, and who has them; the columns' names first."""
    return in_columns(_TASK_CELLS, tasks)


def table(view: RunView) -> list[tuple[str, ...]]:
    """The workers of a run in a database, likewise."""
    return member_table(view.facts["members"]) if "members" in view.facts else worker_table(view.workers)


def worker_table(workers: Sequence[Mapping[str, Any]]) -> list[tuple[str, ...]]:
    """The workers of a run with units, after the columns' names, in the order of their own names."""
    whole = sum(_figure(worker, "samples") for worker in workers)
    return [_COLUMNS, *(_row(worker, whole) for worker in sorted(workers, key=lambda worker: str(worker["name"])))]


def _row(worker: Mapping[str, Any], whole: float) -> tuple[str, ...]:
    samples, idle, here = _figure(worker, "samples"), _figure(worker, "idle_s"), (worker["seen_at"] - worker["joined_at"]).total_seconds()
    return (
        str(worker["name"]),
        _state(worker),
        f"{_figure(worker, 'samples_per_s'):.3g}",
        f"{100 * idle / here:.0f} %" if here > 0 else "-",
        str(worker["completed"]),
        str(round(_figure(worker, "rejected"))),
        f"{samples:,.0f}",
        f"{100 * samples / whole:.0f} %" if whole else "-",
    )


def _state(worker: Mapping[str, Any]) -> str:
    """What a worker does, whether it is connected, and its reason for leaving or pausing."""
    state = printable(str(worker["state"]))
    if worker["alive"] or (worker["left_at"] and state.startswith(("left: ", PAUSED))):
        return state
    return "left" if worker["left_at"] else "gone"


def _figure(worker: Mapping[str, Any], name: str) -> float:
    value = worker["figures"].get(name, 0.0)
    return float(value) if isinstance(value, (int, float)) else 0.0


def lines(view: RunView) -> Iterator[tuple[str, str]]:
    """The other facts about a run, each as a word and a text."""
    plan = view.facts.get("plan", {})
    figures = view.figures
    epoch = f"epoch {figures['epoch']:.2f} of {plan.get('epochs', '?')}, " if "epoch" in figures else ""
    images = max(figures.get("samples", 0), sum(_figure(worker, "samples") for worker in view.workers))
    yield "run", f"{plan.get('name', '?')}: {plan.get('strategy', '?')}, {plan.get('parameters', 0):,} parameters"
    in_units = "members" not in view.facts
    iteration = (view.iteration if in_units else round(figures.get("step", 0))) or 0
    planned = plan.get("steps", "?")
    # Rounds that close with fewer results than planned make more of them.
    of_all = f" of {planned}" if not isinstance(planned, int) or iteration <= planned else ""
    yield "progress", f"{epoch}iteration {iteration}{of_all}, {images:,.0f} {'images' if in_units else 'samples'}"
    if in_units:
        yield "units", units_of(view.units)
    losses = {name: value for name, value in figures.items() if name.endswith(("loss", "accuracy"))}
    yield "figures", "  ".join(f"{name} {value:.4g}" for name, value in losses.items()) or "none yet"
    if "epsilon" in figures:
        protects = Privacy.protects(figures["epsilon"])
        yield "privacy", f"ε = {figures['epsilon']:.4g} spent so far{'' if protects else ', too much to protect the data'}"
    yield "coordinator", _coordinator(view)
    if view.picture is not None:
        yield "samples", f"of iteration {view.picture[0]}, at {view.picture[1].astimezone():%H:%M:%S} (--grid FILE saves them)"


def units_of(units: Mapping[str, int]) -> str:
    """What came of the units, for the teacher. Units that no student has taken are cancelled and offered again with every version of the
    weights: they are not counted, as no work was lost."""
    done, late, failed = units.get("completed", 0), units.get("dropped", 0), units.get("failed", 0)
    share = f" ({100 * late / (done + late):.0f} % of what was handed in)" if late else ""
    given_up = f", {failed} given up after too many failures" if failed else ""
    return f"{done} handed in and used, {late} too late and not used{share}{given_up}; {units.get('claimed', 0)} being computed now"


def _coordinator(view: RunView) -> str:
    if end := view.facts.get("end"):
        return f"has ended: {end}"
    seen = (view.now - view.coordinator_seen_at).total_seconds() if view.coordinator_seen_at else None
    return "not here; workers go on with what is on offer" if seen is None or seen > 10 else "here"
