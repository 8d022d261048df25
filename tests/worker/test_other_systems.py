"""A worker does without what only POSIX has, so it can run on macOS and Windows, too. This fakes them: it was never tried there."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.processes import HANG_S, Command, processes_in

pytestmark = pytest.mark.whole

SOURCE = Path(__file__).resolve().parents[2] / "src" / "shoal"
MODULES = {"fcntl", "grp", "posix", "pty", "pwd", "resource", "syslog", "termios", "tty"}
CALLS = {
    "os": {"chown", "fork", "forkpty", "geteuid", "getpgid", "getuid", "killpg", "mkfifo", "nice", "sched_getaffinity", "setsid", "setuid"}
    | {"sysconf", "uname", "wait"},
    "signal": {"SIGALRM", "SIGCHLD", "SIGHUP", "SIGKILL", "SIGPIPE", "SIGUSR1", "SIGUSR2", "set_wakeup_fd", "setitimer"},
    "socket": {"AF_UNIX", "recv_fds", "send_fds"},
}
LINUX = {"engines/deepspeed/disk.py"}
"""What DeepSpeed does on a disk, which it does on Linux only."""
ROOMS = ("config", "data", "engines", "models", "scheduling", "strategies", "tasks", "transports/zeromq", "updates", "worker")
ROOMS += ("launch/volunteer",)
FILES = (
    "cli/departure.py",
    "cli/join.py",
    "cli/join_limits.py",
    "cli/join_options.py",
    "cli/join_watcher.py",
    "cli/join_worker.py",
    "cli/main.py",
    "runs/worker_run.py",
    "runs/connections.py",
    "runs/folder/worker_checkpoint.py",
    "runs/build_run.py",
)
AS_ON_WINDOWS = """
import os, signal, socket, sys
import torch.distributed, zmq, safetensors.torch, sklearn.datasets, yaml, msgpack, PIL.Image
import asyncio, ctypes, multiprocessing, subprocess, tempfile
for name in [name for name in sys.modules if name.split(".")[0] == "shoal"]:
    del sys.modules[name]
for name in {modules}:
    sys.modules[name] = None
for module, names in {calls}.items():
    for name in names:
        if name != "AF_UNIX":  # socketpair of this system needs it, and Windows has one of its own
            vars(sys.modules[module]).pop(name, None)
sys.platform = "win32"
from shoal.cli.main import main
sys.exit(main(sys.argv[1:]))
"""


def sources() -> Iterator[Path]:
    for room in ROOMS:
        yield from (path for path in sorted((SOURCE / room).rglob("*.py")) if path.relative_to(SOURCE).as_posix() not in LINUX)
    yield from (SOURCE / name for name in FILES)


def guarded(tree: ast.Module, text: list[str]) -> set[int]:
    """Lines inside a `try`, a condition, or a function that says which system it is for: what they do, they do where it can be done."""
    lines: set[int] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Try | ast.If | ast.IfExp | ast.FunctionDef):
            span = range(node.lineno, (node.end_lineno or node.lineno) + 1)
            if not isinstance(node, ast.FunctionDef) or any("sys.platform" in text[number - 1] for number in span):
                lines.update(span)
    return lines


def test_the_workers_code_asks_before_it_uses_what_only_posix_has() -> None:
    found = []
    for path in sources():
        text = path.read_text(encoding="utf-8")
        tree = ast.parse(text)
        safe = guarded(tree, text.split("\n"))
        for node in ast.walk(tree):
            names = [one.name for one in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            called = isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.attr in CALLS.get(node.value.id, ())
            if (called or MODULES & set(names)) and node.lineno not in safe:
                found.append(f"{path.relative_to(SOURCE)}:{node.lineno}")
    assert not found


def test_a_worker_takes_part_from_a_system_without_posix(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text(
        "dialect: shoal\nmodel: {kind: mlp, hidden_sizes: [8]}\ntraining: {batch_size: 64, epochs: 1}\n"
        "strategy: {kind: async}\ntransport: {port: 0}\n"
    )
    (tmp_path / "as_on_windows.py").write_text(
        AS_ON_WINDOWS.format(modules=sorted(MODULES), calls={k: sorted(v) for k, v in CALLS.items()})
    )
    with processes_in(tmp_path) as processes:
        coordinator, command = processes.coordinate("--host", "127.0.0.1")
        worker = Command(["as_on_windows.py", *command, "--name", "win"], tmp_path)
        processes.running.append(worker)
        said, _ = worker.communicate(HANG_S)
        assert worker.returncode == 0, said
        assert "win: " in said
        output, _ = coordinator.communicate(HANG_S)
        assert coordinator.returncode == 0, output
