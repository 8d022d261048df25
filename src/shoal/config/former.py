"""Settings that earlier versions had elsewhere. Files with them still load, run folders among them, and people are told the new place."""

from __future__ import annotations

from collections.abc import Mapping

from shoal.config.layers import Assignment, Settings
from shoal.config.problems import Label, Problem

_OLD, _NEW = ("transport", "kind"), ("engine", "kind")
_OLD_COUNT, _NEW_COUNT = ("cluster", "num_workers"), ("launch", "devices_per_node")


def moved(assignments: list[Assignment], environ: Mapping[str, str]) -> tuple[list[Assignment], list[Problem]]:
    """The assignments with every setting in its present place, and a warning for each that has moved.

    What was `transport.kind: collectives` is `engine.kind: collectives`, and `launch.devices_per_node` counts its processes, which
    `cluster.num_workers` did. torchrun counts its processes itself.
    """
    kinds = sorted((one for one in assignments if one.path == _OLD), key=lambda one: one.layer.rank)
    if not kinds or kinds[-1].node.value != "collectives":
        return assignments, []
    counts = [one for one in assignments if one.path == _OLD_COUNT and one.node.value is not None]
    kept = [one for one in assignments if one not in counts and not _is_old(one) and not _leaves_open(one)]
    now = [] if "RANK" in environ else [one._replace(path=_NEW_COUNT) for one in counts]
    message = "`transport.kind: collectives` is now `engine.kind: collectives`, and launch.devices_per_node says how many processes it has"
    problem = Problem("moved", message, (Label(kinds[-1].node.span),), "transport.kind", "write it in the new way", "warning")
    other = next((one for one in assignments if one.path == _NEW and one.node.value not in ("single", "collectives")), None)
    if other is not None:
        refused = f"the processes of collectives step by themselves, and `engine.kind` is {other.node.value}"
        return [*kept, *now], [Problem("engine", refused, (Label(other.node.span), Label(kinds[-1].node.span)), "engine.kind")]
    return [*kept, *now, kinds[-1]._replace(path=_NEW)], [problem]


def _is_old(assignment: Assignment) -> bool:
    return assignment.path == _OLD and bool(assignment.node.value == "collectives")


def _leaves_open(assignment: Assignment) -> bool:
    return assignment.path == _NEW_COUNT and assignment.node.value is None


def was_a_transport(settings: Settings) -> bool:
    """Whether the engine was asked for in the old place, where workers were its processes."""
    chosen = settings.last(_NEW)
    return chosen is not None and chosen.node.value == "collectives" and chosen.node.user_path == ".".join(_OLD)
