"""`make bench`: ratios to peers, measured in one run. `make bench BENCH="config"` runs one.

Each benchmark is a module here with `measure() -> Iterable[Row]`; the table is printed and written to results/bench.json. A benchmark that
yields its rows has each of them told as soon as it is measured, since some take minutes. `BENCH=moe:on` hands `on` to `measure`.
"""

from __future__ import annotations

import importlib
import json
import os
import platform
import re
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

HERE = Path(__file__).parent
DEFAULT = ["config", "overhead", "generate", "learning", "rules", "update-codecs", "wire", "through", "ingest", "rounds"]
DEFAULT += ["same-answer", "rejection", "byzantine", "private", "engines", "classroom", "makespan"]
# By name only: pipeline, stragglers, diloco, slow-link and simulate-truth (half an hour each), moe (an hour), moe-workers, goodput,
# plan-truth (six minutes), large-models, simulate, speculation, structured, gpu-dense, gpu-moe, gpu-fp8, gpu-ppo, gpu-serve, gpu-diloco,
# gpu-finetune, classroom-quality, classroom-late, rlhf (ten minutes), rlhf-15m, rlhf-pairs, rlhf-reward, ppo, finetune, serve,
# packed-weights, failover, split, watching, on-ray, tree, polite and pipeline-truth (some minutes each)


class Row(NamedTuple):
    """One figure: ours, the peer's, and the ratio that is to be at least (or at most) the target."""

    name: str
    ours: float
    peer: float
    unit: str
    ratio: float
    target: str
    note: str = ""


def machine() -> str:
    """What the figures were measured on: processor, cores, and how busy it is with other things."""
    try:
        told = subprocess.run(["lscpu"], capture_output=True, text=True, check=False, env=os.environ | {"LC_ALL": "C"}).stdout
    except OSError:  # there is none beyond Linux
        told = ""
    found = re.search(r"^Model name:\s*(.+)$", told, re.MULTILINE)
    name = found[1] if found else platform.processor() or "unknown processor"
    load = f", load {os.getloadavg()[0]:.1f}" if hasattr(os, "getloadavg") else ""
    return f"{name} ({platform.machine()}), {os.cpu_count()} cores{load}"


class Stolen:
    """The share of the processors' time that other machines on the same host took, from when this was made."""

    def __init__(self) -> None:
        self._before = self._ticks()

    def __str__(self) -> str:
        passed = [after - before for before, after in zip(self._before, self._ticks(), strict=True)]
        return f", {passed[7] / max(1, sum(passed[:8])):.0%} of the time taken by other machines" if passed else ""

    @staticmethod
    def _ticks() -> list[int]:
        file = Path("/proc/stat")
        return [int(text) for text in file.read_text().splitlines()[0].split()[1:]] if file.exists() else []


def main() -> None:
    sys.modules["run"] = sys.modules["__main__"]
    rows: list[Row] = []
    on, stolen = machine(), Stolen()
    for name in sys.argv[1:] or DEFAULT:
        print(f"measuring {name} …", file=sys.stderr)
        module, *part = name.split(":")
        for row in importlib.import_module(module.replace("-", "_")).measure(*part):
            print(f"  {row.name}: {row.ours:.4g} {row.unit}, {row.ratio:.3g} of {row.peer:.4g}", file=sys.stderr, flush=True)
            rows.append(row)
    width = max((len(row.name) for row in rows), default=0)
    print(f"on {on}{stolen}")
    print(f"{'':<{width}}  {'ours':>10}  {'peer':>10}  {'ratio':>7}  target")
    for row in rows:
        figures = f"{row.ours:>10.4g}  {row.peer:>10.4g}  {row.ratio:>7.3g}"
        print(f"{row.name:<{width}}  {figures}  {row.target}  ({row.unit}) {row.note}".rstrip())
    results = HERE.parent / "results"
    results.mkdir(exist_ok=True)
    (results / "bench.json").write_text(json.dumps([row._asdict() for row in rows], indent=2))


if __name__ == "__main__":
    main()
