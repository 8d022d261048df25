"""`shoal audit`: check that nothing a coordinator confirmed was lost, or counted twice."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from shoal.cli.main import warn
from shoal.cli.options import parse_with_plugins
from shoal.config.schema.strategy import Strategy
from shoal.errors import ShoalError
from shoal.files import open_to_read, parse_json, read_file
from shoal.runs.folder.run_reader import RunFolder, read_summary

if TYPE_CHECKING:
    from shoal.coordinator.audit.files import AuditInput
    from shoal.coordinator.audit.run import AuditReport

_MOST_SHOWN = 20
_MORE_LOOKS = 4
_SILENT_HEARTBEATS = 3
_LONGEST_LINE = 10_000


def run(argv: list[str]) -> int:
    parser = argparse.ArgumentParser("shoal audit", description="Check that no confirmed contribution was lost or counted twice.")
    parser.add_argument("run", metavar="RUN", help="the run's folder, on the machine that coordinated it")
    parser.add_argument(
        "--receipts",
        action="append",
        default=[],
        metavar="PATH",
        help="receipts of workers on other machines: a file or a folder (may be repeated)",
    )
    parser.add_argument("--relay", action="append", default=[], metavar="DIR", help="the folder of a relay of this run (may be repeated)")
    parser.add_argument(
        "--regenerate",
        type=int,
        default=0,
        metavar="N",
        help="generate the answers of N units again with the weights of the run's checkpoints (strategy rollouts)",
    )
    parser.add_argument("--scores", action="store_true", help="measure the kept rounds again that updates.scorer measured")
    arguments = parse_with_plugins(parser, argv)
    folder = Path(arguments.run)
    settings = _settings(folder)
    claims = [path for given in arguments.receipts for path in _receipts(Path(given))]
    report, running = _audit_until_stable(folder, settings, claims)
    for line in report.checked:
        print(line)
    if not in_database(folder):
        from shoal.coordinator.durable.lock import is_held

        if is_held(state_of(folder, settings)) is None:
            print("whether a coordinator is at work here is unknown: only its owner can open its lock")
    relays = [one for given in arguments.relay for one in _lost_by_relay(folder, settings, Path(given))]
    again = _measure_again(folder, settings) if arguments.scores else []
    return _verdict([*report.violations, *relays, *again, *_regenerate(folder, settings, arguments.regenerate)], running)


def _measure_again(folder: Path, settings: Any) -> list[str]:
    """Violations in scores, found by measuring them again."""
    from shoal.runs.folder.measure_again import measure_again

    found: list[str] = []
    own = _from_database if _at(settings, "transport", "kind") == "postgres" else _from_files
    evidence, _ = own(folder, settings, [], [], found)
    done, violations = measure_again(folder, (line for _, line in evidence.ledger))
    for line in done:
        print(line)
    return violations


def _regenerate(folder: Path, settings: Any, most: int) -> list[str]:
    """Violations in answers of workers, found by generating them again."""
    if most <= 0:
        return []
    from shoal.runs.rlhf.regenerate import regenerate

    found: list[str] = []
    evidence, _ = _from_files(folder, settings, [], [], found)
    regenerated = regenerate(folder, (line for _, line in evidence.ledger), most)
    for line in regenerated.format_lines():
        print(line)
    return regenerated.violations()


def _lost_by_relay(folder: Path, settings: Any, relay: Path) -> list[str]:
    """Contributions that a relay sent and the run lacks. The relay is read first, so that the run's files are newer."""
    from shoal.coordinator.audit.run import missing_above

    found: list[str] = []
    below, _ = _from_files(relay, _settings(relay), [], [], found)
    above, _ = _from_files(folder, settings, [], [], found)
    return [*found, *missing_above(above, below)]


def _audit_until_stable(folder: Path, settings: Any, claims: list[Path]) -> tuple[AuditReport, bool]:
    """The report of an audit, and whether the run is still running. Files of a running run change while they are read, so only violations
    that every repetition finds are kept."""
    report, running = _audit(folder, settings, claims)
    for _ in range(_MORE_LOOKS):
        if not (running and report.violations):
            break
        again, running = _audit(folder, settings, claims)
        again.violations = [one for one in again.violations if one in report.violations] if running else again.violations
        report = again
    return report, running


def _audit(folder: Path, settings: Any, claims: list[Path]) -> tuple[AuditReport, bool]:
    from shoal.coordinator.audit.run import audit
    from shoal.coordinator.audit.scores import ScoreAudit
    from shoal.coordinator.audit.units import LagRule

    violations: list[str] = []
    own = _receipts(folder / "workers") if (folder / "workers").is_dir() else []
    in_database = _at(settings, "transport", "kind") == "postgres"
    evidence, running = (_from_database if in_database else _from_files)(folder, settings, own, claims, violations)
    first = None if _at(settings, "checkpoint", "resume_from") else 0
    max_steps = _at(settings, "training", "max_steps")  # a run that ends by them does not complete its epoch
    complete = not running and max_steps is None and read_summary(folder).get("status") == "completed"
    tasks = _at(settings, "scheduler", "kind") not in (None, "none")
    strategy = Strategy.kinds.get(kind := _at(settings, "strategy", "kind"))
    if strategy is None:
        warn(f"the strategy {kind} is of a plugin that is not loaded, so leased units are not checked: add --plugin FILE")
    units = getattr(strategy, "leases_units", False)
    lags = LagRule(_at(settings, "strategy", "max_lag")) if units and not getattr(strategy, "gives_answers", False) else None
    scorer = _at(settings, "updates", "scorer") or {}
    scores = ScoreAudit(float(scorer["memory"])) if scorer.get("enabled") else None
    return audit(evidence, violations, first, units=units, complete=complete, tasks=tasks, lags=lags, scores=scores), running


def _from_files(folder: Path, settings: Any, own: list[Path], claims: list[Path], violations: list[str]) -> tuple[AuditInput, bool]:
    from shoal.coordinator.audit.files import gather
    from shoal.coordinator.durable.lock import is_held

    state = state_of(folder, settings)
    if not (state / "ledger.jsonl").exists():
        raise ShoalError(f"there is no ledger in {state}: only a run that had workers, and has come to its first version, can be audited")
    running = is_held(state) is not False  # another user may be unable to know: what is read may then change, too
    return gather(state, own, violations, claims), running


def _from_database(folder: Path, settings: Any, own: list[Path], claims: list[Path], violations: list[str]) -> tuple[AuditInput, bool]:
    from shoal.cli.db import connected, database_location
    from shoal.cli.options import make_parser, parse

    with database_location(*parse(make_parser("audit", ""), [str(folder)])) as place, connected(place.access) as connection:
        from shoal.coordinator.audit.files import gather_from, gather_receipts
        from shoal.transports.postgres.queries import damage, look, trail

        seen = look(connection)
        violations += damage(connection)
        silence_s = _SILENT_HEARTBEATS * float(_at(settings, "coordinator", "heartbeat_interval_s") or 5.0)
        last = seen.coordinator_seen_at if seen is not None else None
        running = seen is not None and last is not None and (seen.now - last).total_seconds() < silence_s
        evidence = gather_receipts(own, claims, violations)  # first, so that the rest is newer
        return gather_from(evidence, *trail(connection)), running


def _verdict(violations: list[str], running: bool) -> int:
    if not violations:
        print("running: so far nothing is missing, nothing is counted twice" if running else "nothing is missing, nothing is counted twice")
        return 0
    for violation in violations[:_MOST_SHOWN]:
        print(f"violation: {violation}")
    if len(violations) > _MOST_SHOWN:
        print(f"and {len(violations) - _MOST_SHOWN} more")
    return 1


def in_database(folder: Path) -> bool:
    """Whether the coordinator of a run keeps its state in a database."""
    return (folder / "config.yaml").exists() and _at(_settings(folder), "transport", "kind") == "postgres"


def state_of(folder: Path, settings: Any = None) -> Path:
    """Folder of the coordinator's state. `settings`: those of the run, if they have been read."""
    settings = settings or _settings(folder)
    return Path(_at(settings, "coordinator", "state_path") or folder / "coordinator")


def _settings(folder: Path) -> Any:
    """The settings of config.yaml, with the values that the run recorded: an edit or a damage since then changes no audit. Only the
    folder of the coordinator's state may have been moved."""
    settings = _settings_in_yaml(folder)
    settings = settings if isinstance(settings, dict) else {}
    for path, entry in RunFolder(folder).provenance().items():
        section, _, key = path.partition(".")
        if key and path != "coordinator.state_path":
            before = settings.get(section)
            settings[section] = (before if isinstance(before, dict) else {}) | {key: entry["value"]}
    return settings


def _settings_in_yaml(folder: Path) -> Any:
    try:
        content = read_file(folder / "config.yaml")
        if content is None:
            raise ShoalError(f"there is no run at {folder}")
        return yaml.safe_load(content.decode())
    except (ValueError, yaml.YAMLError) as error:
        raise ShoalError(f"{folder / 'config.yaml'} cannot be read: {error}") from None


def _at(settings: Any, section: str, key: str) -> Any:
    found = settings.get(section) if isinstance(settings, dict) else None
    return found.get(key) if isinstance(found, dict) else None


def _receipts(given: Path) -> list[Path]:
    if given.is_file():
        return [given]
    if not given.is_dir():
        raise ShoalError(f"--receipts: there is no file or folder {given}")
    return sorted(path for path in given.iterdir() if path.is_file() and _has_receipts(path))


def _has_receipts(path: Path) -> bool:
    """Whether a file holds receipts; other files in the folder may be logs of the same workers."""
    if path.suffix == ".jsonl":
        return True
    try:
        with open_to_read(path) as file:
            line = parse_json(file.readline(_LONGEST_LINE))
    except (OSError, ValueError, ShoalError):
        return False
    return isinstance(line, list) and len(line) >= 4 and isinstance(line[0], str)
