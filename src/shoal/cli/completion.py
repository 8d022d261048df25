"""`shoal completion`: shell completion. Options are read from the commands' own help."""

from __future__ import annotations

import contextlib
import io
import re
from importlib import import_module

from shoal.cli.main import COMMANDS, parser_of
from shoal.config.presets import names as preset_names

_SCRIPTS = {
    "bash": """\
_shoal() {
  local words; words=$(shoal completion --words "${COMP_WORDS[@]:1:COMP_CWORD}" 2>/dev/null)
  COMPREPLY=($(compgen -W "$words" -f -- "${COMP_WORDS[COMP_CWORD]}"))
}
complete -o filenames -F _shoal shoal
""",
    "zsh": """\
#compdef shoal
_shoal() {
  local -a found; found=(${(f)"$(shoal completion --words "${(@)words[2,CURRENT]}" 2>/dev/null)"})
  compadd -a found
  _files
}
compdef _shoal shoal
""",
    "fish": """\
complete -c shoal -a '(shoal completion --words (commandline -opc)[2..-1] (commandline -ct) 2>/dev/null)'
""",
}
_EPILOG = """\
for bash:  shoal completion bash > ~/.local/share/bash-completion/completions/shoal
for zsh:   shoal completion zsh > "${fpath[1]}/_shoal"
for fish:  shoal completion fish > ~/.config/fish/completions/shoal.fish
"""
_OPTION = re.compile(r"(?<![\w-])--?[A-Za-z][\w-]*")


def run(argv: list[str]) -> int:
    if argv[:1] == ["--words"]:
        print("\n".join(words(argv[1:])))
        return 0
    parser = parser_of("completion", "Print a completion script for your shell.", _EPILOG)
    parser.add_argument("shell", choices=tuple(_SCRIPTS))
    print(_SCRIPTS[parser.parse_args(argv).shell], end="")
    return 0


def words(typed: list[str]) -> list[str]:
    """Completions of the last word."""
    if len(typed) <= 1:
        found = [*COMMANDS, "--help", "--version"]
    elif typed[0] not in COMMANDS:
        found = []
    elif typed[-1].startswith("-"):
        found = sorted(set(_OPTION.findall(_help(typed[0]))))
    else:
        found = [*_subcommands(typed[0]), *preset_names()]
    return [word for word in found if word.startswith(typed[-1] if typed else "")]


def _help(command: str) -> str:
    said = io.StringIO()
    with contextlib.redirect_stdout(said), contextlib.suppress(SystemExit):
        import_module(f"shoal.cli.{command}").run(["--help"])
    return said.getvalue()


def _subcommands(command: str) -> list[str]:
    """Subcommands of a command: those that its help lists, or its first choice (`{bash,zsh,fish}`)."""
    _, title, listed = _help(command).partition("\ncommands:\n")
    if title:
        return re.findall(r"^  ([a-z][\w-]*)", listed, re.MULTILINE)
    found = re.search(r"\{([\w,-]+)\}", _help(command))
    return found[1].split(",") if found else []
