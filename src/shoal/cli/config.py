"""`shoal config`: check, show, explain, compare and migrate configurations."""

from __future__ import annotations

import argparse
import sys

from shoal import ShoalError
from shoal.cli.main import leading_flags, report, run_subcommand
from shoal.cli.options import base_command, load, make_parser, parse, parse_with_plugins, require
from shoal.config.load import LoadedConfig
from shoal.config.missing_parts import (
    missing_chat_template,
    missing_files,
    missing_files_of_earlier_phases,
    missing_model,
    missing_packages,
    missing_workers,
    packed_conversations,
)
from shoal.config.problems import ConfigError, Problem, render
from shoal.config.schema import Run

HELP = """\
usage: shoal config COMMAND …

commands:
  check FILE…          report every problem of a configuration (--format text|json|github)
  show FILE…           print every setting (--origin: with its origin; --format yaml|json)
  explain PATH FILE…   one setting: its origin, the values it overrides, its meaning
  diff A… -- B…        the differences between two configurations
  schema               print the JSON Schema of a native file, for editors
  migrate FILE         rewrite a dialect file with Shoal's keys (--output FILE)

`shoal config COMMAND --help` explains each command.
"""


def run(argv: list[str]) -> int:
    subcommands = {"check": check, "show": show, "explain": explain, "diff": diff, "schema": schema, "migrate": migrate}
    flags, argv = leading_flags(argv)
    return run_subcommand("config", HELP, subcommands, [*argv, *flags] if argv else [])


def check(argv: list[str]) -> int:
    parser = make_parser(
        "config check", "Check a configuration and report every problem at once; exit code 2 if `shoal train` would refuse it."
    )
    parser.add_argument("--format", choices=("text", "json", "github"), default="text")
    arguments, overrides = parse(parser, argv)
    loaded = load(arguments, overrides)
    if loaded.ok:
        loaded.problems += missing_packages(loaded, severity="warning") + missing_model(loaded, severity="warning")
        loaded.problems += missing_files(loaded, severity="warning") + missing_files_of_earlier_phases(loaded, severity="warning")
        loaded.problems += missing_workers(loaded) + missing_chat_template(loaded) + packed_conversations(loaded)
        loaded.problems += _missing_base(loaded, arguments) + _unusable_alerts(loaded)
    if arguments.format != "text":
        print(render(loaded.problems, arguments.format))
    elif loaded.problems:
        report(ConfigError(loaded.problems))
    if loaded.ok and arguments.format == "text":
        print(f"{', '.join(_summary(loaded.run, [parsed.layer.dialect for parsed in loaded.files]))}: OK")
    return 0 if loaded.ok else 2


def _unusable_alerts(loaded: LoadedConfig) -> list[Problem]:
    """A warning where `shoal train` would refuse to start here, since this machine lacks what an alert needs."""
    if not loaded.run.alerts.wanted:
        return []
    from shoal.reporters.alert_channels import channels_of

    try:
        channels_of(loaded.run.alerts)
    except ShoalError as error:
        path, _, message = str(error).partition(": ")
        return [Problem("alerts", message, loaded.settings.labels(path), loaded.settings.spelling(path), severity="warning")]
    return []


def _missing_base(loaded: LoadedConfig, arguments: argparse.Namespace) -> list[Problem]:
    """A warning where `shoal train` would refuse to train the base that a policy starts from, since it is large."""
    if loaded.run.rlhf is None:
        return []
    from shoal.launch.rlhf_phases import in_phases, refuse_large_base

    if not in_phases(loaded.run):
        return []
    try:
        refuse_large_base(loaded.run, base_command(arguments))
    except ShoalError as error:
        return [Problem("missing-model", str(error), loaded.settings.labels("rlhf.reward.kind"), "rlhf.policy", severity="warning")]
    return []


def _summary(run: Run, dialects: list[str]) -> list[str]:
    return [
        f"{'+'.join(dict.fromkeys(dialects)) or 'shoal'} configuration",
        f"{run.chosen_task.kind} with a model of kind {run.model.kind}",
        f"engine {run.engine.kind}",
        f"strategy {run.strategy.kind}",
    ]


def show(argv: list[str]) -> int:
    from shoal.config.show import show as text

    parser = make_parser("config show", "Print every setting of a configuration, secrets masked.")
    parser.add_argument("--origin", action="store_true", help="also print the origin of each")
    parser.add_argument("--format", choices=("yaml", "json"), default="yaml")
    arguments, overrides = parse(parser, argv)
    loaded = require(load(arguments, overrides))
    if loaded.problems:
        report(ConfigError(loaded.problems))
    print(text(loaded, origin=arguments.origin, style=arguments.format), end="")
    return 0


def explain(argv: list[str]) -> int:
    from shoal.config.show import explain as text
    from shoal.config.show import find_setting

    parser = make_parser("config explain", "Explain one setting: its value, origin and meaning.", files="")
    parser.add_argument("path", metavar="PATH", help="a setting, by its path in Shoal's spelling or in that of the files")
    parser.add_argument("files", nargs="*", metavar="FILE")
    arguments, overrides = parse(parser, argv)
    loaded = require(load(arguments, overrides))
    print(text(loaded, find_setting(loaded, arguments.path)), end="")
    return 0


def diff(argv: list[str]) -> int:
    from shoal.config.show import diff as text

    parser = make_parser("config diff", "Compare two configurations: A… -- B…; exit code 1 if they differ.")
    if "--" not in argv:
        arguments, overrides = parse(parser, argv)
        if len(arguments.files) != 2:
            raise ShoalError("put `--` between the files of the two configurations: shoal config diff A… -- B…")
        first, second = (require(load(arguments, overrides, [file])) for file in arguments.files)
    else:
        cut = argv.index("--")
        first, second = (require(load(*parse(parser, side))) for side in (argv[:cut], argv[cut + 1 :]))
    difference = text(first, second)
    print(difference or "no difference\n", end="")
    return 1 if difference else 0


def schema(argv: list[str]) -> int:
    import json

    from shoal.config.reference import json_schema

    parse_with_plugins(argparse.ArgumentParser("shoal config schema", description="Print the JSON Schema of a native file."), argv)
    print(json.dumps(json_schema(), indent=2, ensure_ascii=False))
    return 0


def migrate(argv: list[str]) -> int:
    from shoal.cli.init import write
    from shoal.config.dialects import NAMES
    from shoal.config.migrate import migrate as text

    parser = argparse.ArgumentParser("shoal config migrate", description="Rewrite a dialect file with Shoal's keys; comments are kept.")
    parser.add_argument("file", metavar="FILE", help="a file or a preset")
    parser.add_argument("--output", "-o", metavar="FILE", help="where to write it (default: standard output)")
    parser.add_argument("--dialect", choices=NAMES)
    parser.add_argument("--force", action="store_true", help="overwrite the output")
    arguments = parser.parse_args(argv)
    native = text(arguments.file, arguments.dialect)
    if arguments.output:
        write(arguments.output, native, force=arguments.force)
        print(f"wrote {arguments.output}", file=sys.stderr)
    else:
        print(native, end="")
    return 0
