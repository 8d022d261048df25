"""The folders of a run in phases: one for each phase, below that of the run."""

from __future__ import annotations

import re
from pathlib import Path

BASE, ANSWERS, REWARD, POLICY = "base", "answers", "reward", "policy"
_ORDER = (BASE, ANSWERS, REWARD, POLICY)
_NAME = re.compile(rf"({'|'.join(_ORDER)})(?:-(\d{{1,4}}))?")


def phases_in(folder: Path) -> list[Path]:
    """The folders of the phases that have begun, in the order of training; empty: it is no run in phases."""
    if (folder / "config.yaml").exists() or not folder.is_dir():
        return []
    found = [(match, path) for path in folder.iterdir() if (match := _NAME.fullmatch(path.name)) and (path / "config.yaml").is_file()]
    return [path for _, path in sorted(found, key=lambda pair: (_ORDER.index(pair[0][1]), int(pair[0][2] or 1)))]


def newest_policy(folder: Path) -> Path | None:
    """The phase whose model answers: the policy, or what it starts from. None: there is none."""
    phases = [path for path in phases_in(folder) if not path.name.startswith(REWARD) and (path / "checkpoints").is_dir()]
    return phases[-1] if phases else None
