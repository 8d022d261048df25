"""Options of commands that read a configuration: files, layers, and any setting."""

from __future__ import annotations

import argparse
import os
import shlex
from collections.abc import Sequence

from shoal.cli.main import parser_of, warn
from shoal.config.dialects import NAMES
from shoal.config.load import ConfigFile, LoadedConfig, Override, parse_override, resolve
from shoal.config.problems import ConfigError, Label, Problem
from shoal.config.source_span import SourceText
from shoal.errors import ShoalError

LAYERS = {"config": "base", "hardware_config": "hardware", "distributed_config": "distributed", "rlhf_config": "rlhf"}
EPILOG = """\
any setting is an option:
  --set a.b=c, --override a.b=c    a setting by its path, in the file's spelling or in Shoal's
  --batch_size 32, --batch-size 32 a setting by its name: the one nearest to the top, `training` before others
  --allow-emulation                emulate fp8 on other hardware (training.allow_emulation: true)

FILE may be a preset (`shoal init --list`). Later files override earlier ones, the environment overrides files, options override all.
"""
_LONGEST_TOKEN = 10_000
SWITCHES = ("--allow_emulation", "--allow-emulation")
"""Settings that may be written without a value, meaning true."""

MODEL_HELP = "a run, one of its checkpoints, a run in phases, a folder of Hugging Face or PEFT, or a GGUF file"
"""What a command opens as a model; see `runs/trained_model.py`."""


def make_parser(name: str, description: str, *, files: str = "*") -> argparse.ArgumentParser:
    """A parser with the common options."""
    parser = parser_of(name, description, EPILOG)
    if files:
        parser.add_argument(
            "files", nargs=files, metavar="FILE", help="YAML files or presets, in order (default: $CONFIG_PATH, or config.yaml)"
        )
    for layer, meaning in LAYERS.items():
        spellings = {f"--{layer}", f"--{layer.replace('_', '-')}"}
        parser.add_argument(*sorted(spellings), dest=layer, metavar="FILE", help=f"the {meaning} layer")
    parser.add_argument("--set", "--override", dest="settings", action="append", default=[], metavar="PATH=VALUE", help="set one value")
    add_plugin_option(parser)
    parser.add_argument("--dialect", choices=NAMES, help="dialect of the files, if their keys are ambiguous")
    return parser


def read_token_file(path: str) -> str:
    """The token in a file that the user named, or in a pipe. Raises ShoalError."""
    try:
        with open(path, encoding="utf-8") as file:
            if os.name == "posix" and os.fstat(file.fileno()).st_mode & 0o077:
                warn(f"other users of this machine can read the token in {path}: chmod 600 {shlex.quote(path)}")
            return file.read(_LONGEST_TOKEN).strip()
    except (OSError, ValueError) as error:
        raise ShoalError(f"--token-file: {path} cannot be read: {error}") from None


def add_plugin_option(parser: argparse.ArgumentParser) -> None:
    help = "a plugin: a file (my_parts.py), a module, or the name of an installed one (may be repeated)"
    parser.add_argument("--plugin", dest="plugins", action="append", default=[], metavar="PLUGIN", help=help)


def add_public_address_option(parser: argparse.ArgumentParser) -> None:
    help = "print this address in the command for other machines, if they reach this one by it (NAT, cloud)"
    parser.add_argument("--public-address", metavar="HOST[:PORT]", help=help)


def add_listening_options(parser: argparse.ArgumentParser) -> None:
    """Options of coordinators: where they listen, and how others reach them."""
    parser.add_argument("--host", action="append", default=[], metavar="ADDRESS", help="listen on this address only (default: all)")
    add_public_address_option(parser)


def load_plugins(arguments: argparse.Namespace) -> None:
    """Import the plugins that were named, before any configuration is read."""
    if arguments.plugins:
        from shoal.config import plugins

        plugins.load(*arguments.plugins)


def parse_with_plugins(parser: argparse.ArgumentParser, argv: list[str]) -> argparse.Namespace:
    """The options of a command that reads no configuration; plugins that were named are imported."""
    add_plugin_option(parser)
    arguments = parser.parse_args(argv)
    load_plugins(arguments)
    return arguments


def parse(parser: argparse.ArgumentParser, argv: list[str]) -> tuple[argparse.Namespace, list[Override]]:
    """The options, and the settings that were given as options."""
    known, flags = _split(parser, argv)
    arguments = parser.parse_args(known)
    load_plugins(arguments)
    return arguments, [parse_override(text) for text in arguments.settings] + flags


def load(
    arguments: argparse.Namespace, overrides: list[Override], files: list[str] | None = None, *, resolved: bool = False
) -> LoadedConfig:
    """Resolve what the options name."""
    named = [ConfigFile(path) for path in (arguments.files if files is None else files)]
    layers = [ConfigFile(path, LAYERS[layer]) for layer in LAYERS if (path := getattr(arguments, layer))]
    base = [file for file in layers if file.layer == "base"]
    rest = [file for file in layers if file.layer != "base"]
    return resolve([*base, *named, *rest], overrides, dialect=arguments.dialect, resolved=resolved)


def require(loaded: LoadedConfig) -> LoadedConfig:
    if not loaded.ok:
        raise ConfigError(loaded.problems)
    return loaded


def _split(parser: argparse.ArgumentParser, argv: list[str]) -> tuple[list[str], list[Override]]:
    """Separate the command's options from settings: an unknown `--name value` is a setting."""
    known: list[str] = []
    flags: list[Override] = []
    rest = list(argv)
    while rest:
        word = rest.pop(0)
        option, equals, value = word.partition("=")
        if not word.startswith("--") or word == "--" or _takes_value(parser, option) is not None:
            known.append(word)
            if _takes_value(parser, option) and not equals and rest:
                known.append(rest.pop(0))
            continue
        if option in SWITCHES and not equals and (not rest or rest[0] not in ("true", "false")):
            flags.append(Override(option[2:], "true", word, exact=False))
        elif equals:
            flags.append(Override(option[2:], value, word, exact=False))
        elif rest and not rest[0].startswith("--"):
            value = rest.pop(0)
            flags.append(Override(option[2:], value, f"{word} {value}", exact=False))
        else:
            source = SourceText("command line", word, kind="command line")
            help = f"write {word} VALUE if it is a setting, {word} true for a switch; --help lists the options"
            raise ConfigError([Problem("bad-override", f"`{word}` needs a value", (Label(source.whole()),), help=help)])
    return known, flags


def _takes_value(parser: argparse.ArgumentParser, option: str) -> bool | None:
    """Whether an option takes a value; None if it is not an option of the command."""
    action = parser._option_string_actions.get(option)
    return None if action is None else action.nargs != 0


def slowdowns(texts: Sequence[str]) -> dict[str, float]:
    """Slowdown factors by worker name, from NAME=FACTOR texts. Raises ShoalError."""
    factors = dict[str, float]()
    for name, _, factor in (text.partition("=") for text in texts):
        try:
            factors[name] = float(factor)
        except ValueError:
            factors[name] = 0.0
        if not 1 <= factors[name] < float("inf"):
            raise ShoalError(f"--slowdown: write {name}=8 to make it 8 times slower")
    return factors


def base_command(arguments: argparse.Namespace) -> str:
    """The command that trains the base of a run in phases."""
    layers = [f"--{layer} {path}" for layer in LAYERS if layer != "rlhf_config" and (path := getattr(arguments, layer))]
    return " ".join(["shoal train", *arguments.files, *layers])
