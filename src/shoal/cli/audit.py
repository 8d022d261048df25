"""`shoal audit`: check that nothing a coordinator confirmed was lost, or counted twice."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from shoal.config.schema.strategy import Strategy
from shoal.errors import ShoalError

if TYPE_CHECKING:
    from shoal.coordinator.evidence import Evidence

_MOST_SHOWN = 20


def run(argv: list[str]) -> int:
    made = argparse.ArgumentParser("shoal audit", description="Check that nothing a coordinator confirmed was lost, or counted twice.")
    made.add_argument("run", metavar="RUN", help="the run's folder, on the machine that coordinated it")
    made.add_argument(
        "--receipts", action="append", default=[], metavar="DIR", help="folder with receipts of workers elsewhere (may be repeated)"
    )
    arguments = made.parse_args(argv)
    folder = Path(arguments.run)
    settings = _settings(folder)
    receipts = [*sorted((folder / "workers").glob("*.jsonl")), *(path for given in arguments.receipts for path in _receipts(Path(given)))]
    first = None if _at(settings, "checkpoint", "resume_from") else 0
    violations: list[str] = []
    in_database = _at(settings, "transport", "kind") == "postgres"

    from shoal.coordinator.audit import audit

    evidence = (_from_database if in_database else _from_files)(folder, settings, receipts, violations)
    report = audit(evidence, violations, first, units=_leases_units(settings))
    for line in report.checked:
        print(line)
    return _verdict(report.violations)


def _from_files(folder: Path, settings: Any, receipts: list[Path], violations: list[str]) -> Evidence:
    from shoal.coordinator.evidence import gather

    state = Path(_at(settings, "coordinator", "state_path") or folder / "coordinator")
    if not (state / "ledger.jsonl").exists():
        raise ShoalError(f"there is no ledger in {state}: only a run that had workers, and has come to its first version, can be audited")
    return gather(state, receipts, violations)


def _from_database(folder: Path, settings: Any, receipts: list[Path], violations: list[str]) -> Evidence:
    from shoal.cli.db import connected, place_of
    from shoal.cli.options import parse, parser

    with place_of(*parse(parser("audit", ""), [str(folder)])) as place, connected(place.access) as connection:
        from shoal.coordinator.evidence import gather_from
        from shoal.transports.postgres.view import trail

        return gather_from(*trail(connection), receipts, violations)


def _verdict(violations: list[str]) -> int:
    if not violations:
        print("nothing is missing, nothing is counted twice")
        return 0
    for violation in violations[:_MOST_SHOWN]:
        print(f"violation: {violation}")
    if len(violations) > _MOST_SHOWN:
        print(f"and {len(violations) - _MOST_SHOWN} more")
    return 1


def _settings(folder: Path) -> Any:
    try:
        return yaml.safe_load((folder / "config.yaml").read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ShoalError(f"there is no run at {folder}") from None
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise ShoalError(f"{folder / 'config.yaml'} cannot be read: {error}") from None


def _at(settings: Any, section: str, key: str) -> Any:
    found = settings.get(section) if isinstance(settings, dict) else None
    return found.get(key) if isinstance(found, dict) else None


def _leases_units(settings: Any) -> bool:
    """Whether the run's strategy leases units of the data; one of a plugin that is not here counts as one that does not."""
    return getattr(Strategy.kinds.get(_at(settings, "strategy", "kind")), "leases_units", False)


def _receipts(given: Path) -> list[Path]:
    if given.is_file():
        return [given]
    if not given.is_dir():
        raise ShoalError(f"--receipts: there is no folder {given}")
    return sorted(given.glob("*.jsonl"))
