"""`shoal runs`: a table of past runs."""

from __future__ import annotations

import argparse
import json
import re
from pathlib import Path
from typing import Any

from shoal.errors import ShoalError


def run(argv: list[str]) -> int:
    made = argparse.ArgumentParser("shoal runs", description="List past runs, newest first.")
    made.add_argument("folder", nargs="?", default="runs", help="where to look (default: runs)")
    made.add_argument("--format", choices=("text", "json"), default="text")
    arguments = made.parse_args(argv)
    if not Path(arguments.folder).is_dir():
        raise ShoalError(f"there is no folder {arguments.folder}")
    found = sorted(Path(arguments.folder).rglob("provenance.json"), key=lambda path: path.stat().st_mtime, reverse=True)
    rows = [_row(path.parent) for path in found if (path.parent / "config.yaml").exists()]
    if arguments.format == "json":
        print(json.dumps(rows, indent=2))
    elif not rows:
        print(f"no runs in {arguments.folder}")
    else:
        _table(rows)
    return 0


def _row(folder: Path) -> dict[str, Any]:
    try:
        read = json.loads((folder / "summary.json").read_text(encoding="utf-8"))
        summary = {name: read[name] for name in ("status", "metrics", "steps", "wall_s")}
    except (OSError, ValueError, KeyError, TypeError):
        summary = {"status": "running or killed", "metrics": {}, "steps": _last_step(folder)}
    config = (folder / "config.yaml").read_text(encoding="utf-8")
    task = re.search(r"^task:(?: |\n  kind: )(\S+)", config, re.MULTILINE)
    metrics = summary["metrics"].get("eval") or summary["metrics"].get("train") or {}
    best = next((f"{name} {metrics[name]:.4g}" for name in ("accuracy", "loss", "discriminator_loss") if name in metrics), "")
    row = {"run": str(folder), "task": task.group(1) if task else "", "status": summary["status"]}
    return row | {"steps": summary["steps"], "result": best, "wall_s": summary.get("wall_s")}


def _last_step(folder: Path) -> int:
    try:
        lines = (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
        return int(json.loads(lines[-1])["step"])
    except (OSError, ValueError, IndexError, KeyError):
        return 0


def _table(rows: list[dict[str, Any]]) -> None:
    cells = [[str(name) for name in rows[0]]] + [["" if value is None else str(value) for value in row.values()] for row in rows]
    widths = [max(len(line[i]) for line in cells) for i in range(len(cells[0]))]
    for line in cells:
        print("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip())
