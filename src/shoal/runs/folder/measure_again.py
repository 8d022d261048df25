"""Audit of scores: kept rounds are measured again, with the run's own model and held-out data, and compared with the ledger."""

from __future__ import annotations

import random
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

from shoal import strategies
from shoal.coordinator.rounds.scoring import measured, moves_of
from shoal.errors import ShoalError
from shoal.runs.build_run import assemble
from shoal.runs.folder.measured_rounds import KeptRound, kept_rounds
from shoal.runs.folder.run_directory import RunDirectory
from shoal.runs.training.contribution_scorer import HeldOutScorer
from shoal.updates import codecs
from shoal.updates.rules.scores import HeldOutLosses

_TOLERANCE = 1e-4
"""Relative difference of a loss that another machine's rounding explains."""


def measure_again(folder: Path, ledger: Iterable[dict[str, Any]]) -> tuple[list[str], list[str]]:
    """What was measured again, and violations. Raises ShoalError if the run keeps no measured rounds."""
    rounds = kept_rounds(folder)
    if not rounds:
        raise ShoalError(f"--scores: {folder} keeps no measured rounds: updates.scorer.enabled and updates.scorer.kept decide that")
    lines = {line["version"] - 1: line for line in ledger if "version" in line and "scores" in line}
    repeat, found = _Repeat(folder), list[str]()
    for kept in rounds:
        if kept.version not in lines:
            found.append(f"round {kept.version} was measured, and the ledger has no scores of it")
        else:
            found += [f"round {kept.version}: {what}" for what in repeat.differences(kept, lines[kept.version])]
    return [f"scores    measured again: round{'s' * (len(rounds) != 1)} {', '.join(str(one.version) for one in rounds)}"], found


class _Repeat:
    """The run's model, held-out data and policies."""

    def __init__(self, folder: Path) -> None:
        self.run = RunDirectory(folder).config_as_written(lambda text: None)
        cpu = self.run.replace(training=self.run.training.replace(device="cpu", compile=False))
        parts = assemble(cpu, None, folder, lambda samples: 1)
        self.policies = strategies.policies_for(self.run, 1)
        self.spans = self.policies.spans(parts.single.layouts)
        self.scorer = HeldOutScorer(parts, random.Random(0))

    def differences(self, kept: KeptRound, line: dict[str, Any]) -> list[str]:
        if [[record["worker"], record["seq"]] for record, _ in kept.contributions] != [one[:2] for one in line["from"]]:
            return ["the contributions that were kept are not those in the ledger"]
        claimed, again = HeldOutLosses(*line["scores"]), self._measure(kept, HeldOutLosses(*line["scores"]).batches)
        pairs = [("before", claimed.before, again.before)]
        names = [record["worker"] for record, _ in kept.contributions]
        pairs += [(f"after {name}", old, new) for name, old, new in zip(names, claimed.after, again.after, strict=True)]
        wrong = [f"the loss {what} was {new:.6f}, and the ledger says {old:.6f}" for what, old, new in pairs if not _near(old, new)]
        copies = [] if claimed.copies == again.copies else [f"the copies are {again.copies}, and the ledger says {claimed.copies}"]
        return wrong + copies

    def _measure(self, kept: KeptRound, batches: list[int]) -> HeldOutLosses:
        span = self.spans[kept.version % len(self.spans)] if self.spans else None
        size = kept.weights.numel() if span is None else span[1] - span[0]
        bodies = [frames[:-1] if kept.buffers.numel() else frames for _, frames in kept.contributions]
        vectors: list[torch.Tensor] = [codecs.decode(self.run.updates.codec, size, body) for body in bodies]
        return measured(self.scorer, kept.weights, kept.buffers, span, vectors, moves_of(self.policies.contribution), batches)


def _near(old: float, new: float) -> bool:
    return abs(old - new) <= _TOLERANCE * max(1.0, abs(old))
