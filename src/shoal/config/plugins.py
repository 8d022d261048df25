"""Plugins: finding, importing, and identifying them by name and digest.

A plugin is imported only if the user of this machine names it, on the command line or in Python; a configuration or a coordinator cannot.
A run's folder and a coordinator's welcome hold names and digests of plugins, never their code.
"""

from __future__ import annotations

import hashlib
import re
import sys
from collections.abc import Callable, Mapping
from importlib import import_module
from importlib.machinery import ModuleSpec, SourceFileLoader, all_suffixes
from importlib.util import find_spec, module_from_spec, spec_from_file_location
from pathlib import Path
from types import CodeType, ModuleType
from typing import TYPE_CHECKING, NamedTuple

from shoal.config import parts
from shoal.config.fields import did_you_mean
from shoal.errors import ShoalError

if TYPE_CHECKING:
    from shoal.config.schema import Run

GROUP = "shoal.plugins"
"""Entry-point group with which installed packages declare plugins."""


class Plugin(NamedTuple):
    """A plugin that this process has imported."""

    name: str
    """Its name on all machines: that of its file, module or entry point."""
    given: str
    """The argument that named it."""
    path: Path
    module: str
    digest: str
    """SHA-256 of its file, or of all files of a package that Python can import."""


_NAME, _DIGEST = re.compile(r"[\w.-]{1,200}"), re.compile(r"[0-9a-f]{64}")
_CODE = tuple(all_suffixes())
LOADED: dict[str, Plugin] = {}
"""The plugins of this process, by name."""


def load(*named: str | Path) -> list[Plugin]:
    """Import plugins: files, modules by their dotted names, or entry points of installed packages. Raises ShoalError.

    A plugin that was imported before is kept, unless its file has changed; then it is imported again.
    """
    return [_load(str(given)) for given in named]


def _load(given: str) -> Plugin:
    if given.endswith(".py"):
        return _load_file(given, Path(given).expanduser().resolve())
    name, module = given, _entry_points().get(given, given)
    if given in LOADED:
        return LOADED[given]
    spec = _spec_of(module)
    if spec is None or spec.origin is None:
        raise ShoalError(_not_found(given))
    path = Path(spec.origin)
    return _import(Plugin(name, given, path, module, _digest(path)), lambda: import_module(module))


def _load_file(given: str, path: Path) -> Plugin:
    if not _NAME.fullmatch(path.name):
        raise ShoalError(f"the plugin {given}: give its file a name of letters, digits, `_`, `-` and `.`")
    known = LOADED.get(path.name)
    if known is not None and known.path != path:
        raise ShoalError(f"two plugins are called {path.name}: {known.path} and {path}; rename one of them")
    try:
        digest = _digest(path)
    except OSError as error:
        raise ShoalError(f"the plugin {given} cannot be read: {error.strerror or error}") from None
    if known is not None and known.digest == digest:
        return known
    if known is not None:
        unload(known)
    module = f"plugin_{''.join(letter if letter.isalnum() else '_' for letter in path.stem)}"
    return _import(Plugin(path.name, given, path, module, digest), lambda: _run_file(module, path))


def _import(plugin: Plugin, run: Callable[[], object]) -> Plugin:
    """Run a plugin's code; if it fails, unregister all of it. Holds: what was run has the digest."""
    try:
        run()
        _expect_builders(plugin)
        if _digest(plugin.path) != plugin.digest:
            raise ShoalError(f"the plugin {plugin.given} was changed while it was loaded: start again")
    except Exception as error:
        unload(plugin)
        if isinstance(error, ShoalError):
            raise
        raise ShoalError(f"the plugin {plugin.given} cannot be imported: {_format_error(error, plugin.path)}") from error
    LOADED[plugin.name] = plugin
    return plugin


def _run_file(name: str, path: Path) -> None:
    spec = spec_from_file_location(name, path, loader=_UncachedLoader(name, str(path)))
    assert spec is not None
    assert spec.loader is not None
    module: ModuleType = module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)


class _UncachedLoader(SourceFileLoader):
    """Compiles the file as it is now. Python's bytecode cache compares seconds, in which a file may change twice."""

    def get_code(self, fullname: str) -> CodeType:
        path = self.get_filename(fullname)
        return self.source_to_code(self.get_data(path), path)


def _format_error(error: BaseException, path: Path) -> str:
    """An error in a plugin, with the plugin's line that caused it."""
    line, trace = 0, error.__traceback__
    while trace is not None:
        line = trace.tb_lineno if trace.tb_frame.f_code.co_filename == str(path) else line
        trace = trace.tb_next
    where = f" ({path}:{line})" if line else ""
    return f"{type(error).__name__}: {error}{where}"


def unload(plugin: Plugin) -> None:
    """Unregister a plugin's parts and forget its modules."""
    for family in parts.FAMILIES.values():
        for kind in [kind for kind, part in family.kinds.items() if _is_of(part.__module__, plugin)]:
            del family.kinds[kind]
    LOADED.pop(plugin.name, None)
    for name in [name for name in sys.modules if _is_of(name, plugin)]:
        del sys.modules[name]


def _expect_builders(plugin: Plugin) -> None:
    """Raise ShoalError if a part of a plugin has no builder."""
    for family in parts.FAMILIES.values():
        for part in [part for part in family.kinds.values() if _is_of(part.__module__, plugin)]:
            if part.made_by is None:
                part.builder()


def _is_of(module: str, plugin: Plugin) -> bool:
    return module == plugin.module or module.startswith(f"{plugin.module}.")


def _digest(path: Path) -> str:
    """SHA-256 of a file, or of all files of a package that Python can import, with their names."""
    if path.name != "__init__.py":
        return hashlib.sha256(path.read_bytes()).hexdigest()
    digest = hashlib.sha256()
    code = (file for file in path.parent.rglob("*") if file.name.endswith(_CODE) and file.parent.name != "__pycache__")
    for file in sorted(code):
        digest.update(f"{file.relative_to(path.parent).as_posix()}\0{hashlib.sha256(file.read_bytes()).hexdigest()}\n".encode())
    return digest.hexdigest()


def _entry_points() -> dict[str, str]:
    """Modules of plugins in installed packages, by name."""
    from importlib.metadata import entry_points

    return {point.name: point.module for point in entry_points(group=GROUP)}


def _spec_of(module: str) -> ModuleSpec | None:
    try:
        return find_spec(module)
    except (ImportError, ValueError):
        return None


def _not_found(given: str) -> str:
    installed = _entry_points()
    names = f" (installed are {', '.join(installed)})" if installed else ""
    help = did_you_mean(given, installed, "; did you mean `{}`?")
    file = f"; is it the file {given}.py?" if Path(f"{given}.py").is_file() else ""
    return f"there is no plugin `{given}`: name a file that ends in .py, a module, or an installed plugin{names}{help or file}"


# --- which plugins a run needs ------------------------------------------------------------------------


def needed_by(run: Run) -> dict[str, str]:
    """Digests of the plugins whose parts a run uses, by name. Raises ShoalError for a part that other processes could not import.

    A part that the program itself declares is allowed if the whole run is in this process.
    """
    within = run.strategy.kind == "local" or run.transport.kind == "in-process"
    found: dict[str, str] = {}
    for part in parts.used_by(run):
        plugin = next((plugin for plugin in LOADED.values() if _is_of(part.__module__, plugin)), None)
        if plugin is not None:
            found[plugin.name] = plugin.digest
        elif not within and not part.__module__.startswith("shoal."):
            raise ShoalError(
                f"the {part.noun} of {parts.source_location(part)} is in no plugin, so other processes cannot have it: "
                "put it into a file of its own, and name that as a plugin"
            )
    return dict(sorted(found.items()))


def require_same(needed: Mapping[str, str], what: str) -> None:
    """Raise ShoalError unless every needed plugin was loaded here in the same version. `what` names the run in messages."""
    for name, digest in needed.items():
        if not _NAME.fullmatch(str(name)) or not _DIGEST.fullmatch(str(digest)):
            raise ShoalError(f"{what} has an invalid plugin entry: {name!r}, {digest!r}")
    missing = {name: digest for name, digest in needed.items() if name not in LOADED}
    if missing:
        named = ", ".join(f"{name} (SHA-256 {digest[:16]}…)" for name, digest in missing.items())
        raise ShoalError(
            f"{what} needs the plugin {named}, which was not named here: get it from the owner of the run, read it, and add "
            + " ".join(f"--plugin {name}" for name in missing)
        )
    for name, digest in needed.items():
        here = LOADED[name]
        if here.digest != digest:
            raise ShoalError(
                f"{what} needs the plugin {name} with SHA-256 {digest[:16]}…, and {here.path} has {here.digest[:16]}…: "
                f"put the same version in its place, and add --plugin {here.given}"
            )


def as_arguments() -> list[str]:
    """Command-line arguments with which another process loads the same plugins."""
    return [word for plugin in LOADED.values() for word in ("--plugin", plugin.given)]
