"""`shoal doctor`: checks whether this machine can train, and prints remedies."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

_MARKS = {"good": "✓", "doubtful": "·", "bad": "✗"}
_PLAIN = {"good": "ok", "doubtful": "--", "bad": "!!"}


def run(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(
        "shoal doctor", description="Check this machine: Python, torch, GPUs, disk, clock, ports, database, extras."
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    arguments = parser.parse_args(argv)
    from shoal.launch.doctor import BAD, examine

    findings = []
    for finding in examine(Path.cwd()):
        findings.append(finding)
        if not arguments.json:
            _show(*finding)
    bad = [finding for finding in findings if finding.state == BAD]
    if arguments.json:
        print(json.dumps([finding._asdict() for finding in findings], indent=2))
    elif bad:
        print(f"\n{len(bad)} of these must be fixed before a run can start here")
    else:
        print("\nthis machine can train; checks that are marked with a dot matter only for some runs")
    return 1 if bad else 0


def _show(what: str, state: str, finding: str, advice: str) -> None:
    marks = _MARKS if (sys.stdout.encoding or "").lower().startswith("utf") else _PLAIN
    print(f"{marks[state]} {what:<18} {finding}" + (f"\n  {'':<18} → {advice}" if advice else ""), flush=True)
