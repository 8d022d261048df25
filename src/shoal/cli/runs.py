"""`shoal runs`: lists runs, and compares some of them."""

from __future__ import annotations

import argparse
import json
import re
import statistics
from pathlib import Path
from typing import Any

from shoal.errors import ShoalError
from shoal.files import parse_json, read_file
from shoal.runs.folder.run_reader import PHASES, SECONDS, RunFolder, Tail, read_summary

_MOST_BYTES = 1 << 30


def run(argv: list[str]) -> int:
    if argv[:1] == ["compare"]:
        return compare(argv[1:])
    parser = argparse.ArgumentParser("shoal runs", description="List runs, newest first. `shoal runs compare A B` compares runs.")
    parser.add_argument("folder", nargs="?", default="runs", help="folder of runs (default: runs)")
    parser.add_argument("--format", choices=("text", "json"), default="text")
    arguments = parser.parse_args(argv)
    if not Path(arguments.folder).is_dir():
        raise ShoalError(f"there is no folder {arguments.folder}")
    found = sorted(Path(arguments.folder).rglob("provenance.json"), key=lambda path: path.stat().st_mtime, reverse=True)
    rows = [_row(path.parent) for path in found if (path.parent / "config.yaml").exists()]
    if arguments.format == "json":
        print(json.dumps(rows, indent=2))
    elif not rows:
        print(f"no runs in {arguments.folder}")
    else:
        print(_lines(rows))
    return 0


def compare(argv: list[str]) -> int:
    parser = argparse.ArgumentParser("shoal runs compare", description="Compare runs: differing settings, results, a plot.")
    parser.add_argument("runs", nargs="+", metavar="RUN", help="runs' folders, two at least")
    parser.add_argument("--figure", default="loss", help="the metric to plot (default: loss)")
    parser.add_argument("--by", choices=("step", "samples", "time"), default="step", help="the x axis (default: step)")
    parser.add_argument("--plot", default="comparison.png", metavar="FILE", help="file of the plot (default: comparison.png)")
    arguments = parser.parse_args(argv)
    if len(arguments.runs) < 2:
        parser.error("name two runs at least")
    folders = [RunFolder(Path(name)) for name in arguments.runs]
    print(f"results\n{_lines([_row(folder.path) for folder in folders])}")
    print(f"\nspeed (medians of the records)\n{_lines(_without_empty([_speed(folder) for folder in folders]))}")
    print(f"\nsettings that differ\n{_lines(_differences(folders)) or '  none'}")
    return _plot(folders, arguments.figure, arguments.by, Path(arguments.plot))


def _speed(folder: RunFolder) -> dict[str, Any]:
    """The median rates of a run, its peak memory, and the milliseconds of each phase of a step."""
    records = [one for one in Tail(folder.path / "metrics.jsonl").values() if one.get("split") == "train"]

    def median(name: str) -> float | None:
        values = [one[name] for one in records if isinstance(one.get(name), int | float)]
        return statistics.median(values) if values else None

    row: dict[str, Any] = {"run": str(folder.path)}
    for name, field in (("samples/s", "samples_per_s"), ("tokens/s", "tokens_per_s")):
        row[name] = None if (value := median(field)) is None else f"{value:,.1f}"
    row["mfu"] = "none" if (value := median("mfu")) is None else f"{value:.1%}"
    row["memory"] = None if (value := median("memory_bytes")) is None else f"{value / 2**30:.2f} GiB"
    for phase in PHASES:
        row[f"{phase.replace('_', '+')} ms"] = None if (value := median(f"{SECONDS}{phase}")) is None else f"{1000 * value:.3g}"
    return row


def _without_empty(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The rows without the columns that are empty in all of them."""
    return [{name: value for name, value in row.items() if any(one[name] is not None for one in rows)} for row in rows]


def _differences(folders: list[RunFolder]) -> list[dict[str, Any]]:
    """Settings that differ between the runs."""
    settings = [folder.provenance() for folder in folders]
    rows = []
    for path in dict.fromkeys(path for one in settings for path in one):
        values = [json.dumps((one.get(path) or {}).get("value")) for one in settings]
        if len(set(values)) > 1:
            rows.append({"setting": path} | {str(folder.path): value for folder, value in zip(folders, values, strict=True)})
    return rows


def _plot(folders: list[RunFolder], figure: str, by: str, path: Path) -> int:
    from shoal.reporters.plots import save_curves

    axis = "wall_s" if by == "time" else by
    curves = {}
    for folder in folders:
        records = [one for one in Tail(folder.path / "metrics.jsonl").values() if figure in one and axis in one]
        for split in ("train", "eval"):
            points = [(one[axis], one[figure]) for one in records if one.get("split") == split and one[figure] is not None]
            if points:
                curves[f"{folder.path} {split}"] = points
    if not curves:
        known = {name for folder in folders for one in Tail(folder.path / "metrics.jsonl").values() for name in one}
        raise ShoalError(f"no run has recorded `{figure}`; there are {', '.join(sorted(known)) or 'no records'}")
    save_curves(curves, path, x_title="seconds" if by == "time" else by, y_title=figure)
    print(f"\n{figure} by {by}: {path}")
    return 0


def _row(folder: Path) -> dict[str, Any]:
    summary: dict[str, Any] = {"status": "running or killed", "metrics": {}, "steps": _last_step(folder)}
    try:
        summary |= read_summary(folder)
    except ShoalError:
        summary["status"] = "of another version"
    config = _text(folder / "config.yaml")
    task = re.search(r"^task:(?: |\n  kind: )(\S+)", config, re.MULTILINE)
    metrics = summary["metrics"].get("eval") or summary["metrics"].get("train") or {}
    best = next((f"{name} {metrics[name]:.4g}" for name in ("accuracy", "loss", "discriminator_loss") if name in metrics), "")
    row = {"run": str(folder), "task": task.group(1) if task else "", "status": summary["status"]}
    return row | {"steps": summary["steps"], "result": best, "wall_s": summary.get("wall_s")}


def _last_step(folder: Path) -> int:
    try:
        return int(parse_json(_text(folder / "metrics.jsonl").splitlines()[-1])["step"])
    except (ValueError, IndexError, KeyError, TypeError):
        return 0


def _text(path: Path) -> str:
    """The text of a file; empty where it cannot be read."""
    try:
        return (read_file(path, _MOST_BYTES) or b"").decode("utf-8", "replace")
    except ShoalError:
        return ""


def _lines(rows: list[dict[str, Any]]) -> str:
    """Rows as an aligned text table."""
    if not rows:
        return ""
    cells = [[str(name) for name in rows[0]]] + [["" if value is None else str(value) for value in row.values()] for row in rows]
    widths = [max(len(line[i]) for line in cells) for i in range(len(cells[0]))]
    return "\n".join("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in cells)
