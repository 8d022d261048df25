"""`shoal config`: everything about configurations, without starting anything."""

from __future__ import annotations

import sys

from shoal import ShoalError
from shoal.cli.main import leading_flags, report
from shoal.cli.options import add_plugin_option, load, load_plugins, make_parser, parse, require
from shoal.config.missing_packages import package_problems
from shoal.config.problems import ConfigError, render
from shoal.config.schema import Run

HELP = """\
usage: shoal config COMMAND …

commands:
  check FILE…          is it good? every problem at once (--format text|json|github)
  show FILE…           every setting, resolved (--origin: and where it comes from; --format yaml|json)
  explain PATH FILE…   one setting: who set it, whom they overrode, what it means
  diff A… -- B…        what differs between two configurations
  schema               JSON Schema of a native file, for editors
  migrate FILE         a dialect file in Shoal's own words (--output FILE)

`shoal config COMMAND --help` tells more.
"""


def run(argv: list[str]) -> int:
    commands = {"check": check, "show": show, "explain": explain, "diff": diff, "schema": schema, "migrate": migrate}
    flags, argv = leading_flags(argv)
    if not argv or argv[0] in ("--help", "-h"):
        print(HELP, end="")
        return 0
    if argv[0] not in commands:
        raise ShoalError(f"no command `config {argv[0]}`; there are {', '.join(commands)}")
    return commands[argv[0]]([*argv[1:], *flags])


def check(argv: list[str]) -> int:
    parser = make_parser(
        "config check", "Check a configuration: everything that `shoal train` would refuse, at once; exit code 2 if it would."
    )
    parser.add_argument("--format", choices=("text", "json", "github"), default="text")
    arguments, overrides = parse(parser, argv)
    loaded = load(arguments, overrides)
    if loaded.ok:
        loaded.problems += package_problems(loaded, packages="warning")
    if arguments.format != "text":
        print(render(loaded.problems, arguments.format))
    elif loaded.problems:
        report(ConfigError(loaded.problems))
    if loaded.ok and arguments.format == "text":
        print(f"{', '.join(_summary(loaded.run, [parsed.layer.dialect for parsed in loaded.files]))}: OK")
    return 0 if loaded.ok else 2


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
    parser.add_argument("--origin", action="store_true", help="and where each comes from")
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

    parser = make_parser("config explain", "Tell where the value of one setting comes from.", files="")
    parser.add_argument("path", metavar="PATH", help="a setting: its path in Shoal's words or in the files'")
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
    import argparse
    import json

    from shoal.config.reference import json_schema

    parser = argparse.ArgumentParser("shoal config schema", description="Print the JSON Schema of a native file.")
    add_plugin_option(parser)
    load_plugins(parser.parse_args(argv))
    print(json.dumps(json_schema(), indent=2, ensure_ascii=False))
    return 0


def migrate(argv: list[str]) -> int:
    import argparse

    from shoal.cli.init import write
    from shoal.config.dialects import NAMES
    from shoal.config.migrate import migrate as text

    parser = argparse.ArgumentParser("shoal config migrate", description="Rewrite a dialect file in Shoal's own words, comments kept.")
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
