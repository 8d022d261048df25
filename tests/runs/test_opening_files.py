"""Files are opened as the owner means it: private ones from their first byte, and nothing else than a file in a file's place."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from shoal.coordinator.durable.lock import FolderLock, is_held
from shoal.coordinator.durable.receipt_seal import key_in
from shoal.errors import ShoalError
from shoal.files import JsonFormat, make_folder, open_file, read_file, secret_in, write_file
from shoal.runs.invitation import CoordinatorSecrets
from shoal.transports.keys import new_keys

FORMAT = JsonFormat("example", 1, private=True)
USES: dict[str, Callable[[Path], object]] = {
    "append": lambda path: open_file(path, "ab", private=True),
    "change": lambda path: open_file(path, "r+b"),
    "text": lambda path: open_file(path, "a"),
    "read": read_file,
    "json": FORMAT.read,
    "secret": lambda path: secret_in(path, lambda: "made"),
}


def mode_of(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_a_private_file_is_private_from_its_first_byte_and_an_old_one_is_corrected(tmp_path: Path) -> None:
    old = os.umask(0)
    try:
        with open_file(tmp_path / "new", "ab", private=True):
            assert mode_of(tmp_path / "new") == 0o600
        make_folder(tmp_path / "folder" / "inner", private=True)
    finally:
        os.umask(old)
    assert mode_of(tmp_path / "folder" / "inner") == 0o700
    for name, use in USES.items():
        path = tmp_path / name
        path.write_text('{"format": 1}')
        path.chmod(0o644)
        use(path)
        assert (mode_of(path) == 0o600) == (name in ("append", "json", "secret")), name


@pytest.mark.parametrize("use", USES)
@pytest.mark.parametrize("what", ["a named pipe", "a folder", "a device"])
def test_what_is_no_file_is_refused_by_name_at_once(tmp_path: Path, use: str, what: str) -> None:
    path = tmp_path / "place"
    if what == "a named pipe":
        os.mkfifo(path)
    elif what == "a folder":
        path.mkdir()
    else:
        path = Path("/dev/null")
    with pytest.raises(ShoalError, match=f"{path} is {what}, and a file belongs there"):
        USES[use](path)


def test_a_link_in_the_place_of_a_file_is_not_written_through(tmp_path: Path) -> None:
    target = tmp_path / "target"
    target.write_text("mine")
    for name, leads_to in (("link", target), ("nowhere", tmp_path / "made")):
        (tmp_path / name).symlink_to(leads_to)
        with pytest.raises(ShoalError, match=f"{name} is a link"):
            open_file(tmp_path / name, "ab", private=True)
    write_file(tmp_path / "link", "other", private=True)
    assert target.read_text() == "mine"
    assert not (tmp_path / "made").exists()
    assert read_file(tmp_path / "link") == b"other"


def test_files_that_are_too_large_or_not_there_are_named(tmp_path: Path) -> None:
    path = tmp_path / "large"
    path.write_bytes(b"x" * 11)
    assert read_file(path, 11) == b"x" * 11
    with pytest.raises(ShoalError, match=f"{path} is too large"):
        read_file(path, 10)
    assert read_file(tmp_path / "missing") is None
    with pytest.raises(ShoalError, match=f"cannot read {path}/below: Not a directory"):
        read_file(path / "below")
    with pytest.raises(ShoalError, match=f"cannot make the folder {path}"):
        make_folder(path)


def test_a_secret_stays_the_same_and_a_damaged_one_is_named(tmp_path: Path) -> None:
    key = key_in(tmp_path)
    assert key_in(tmp_path) == key
    for damaged in (b"", b"\xff\xfe", b"no digits"):
        (tmp_path / "receipts.key").write_bytes(damaged)
        with pytest.raises(ShoalError, match=f"{tmp_path}/receipts.key is damaged"):
            key_in(tmp_path)


def test_secrets_that_others_could_read_are_corrected_when_they_are_read(tmp_path: Path) -> None:
    CoordinatorSecrets("token", new_keys()).save(tmp_path)
    key_in(tmp_path)
    for name in ("secrets.json", "receipts.key"):
        (tmp_path / name).chmod(0o644)
    CoordinatorSecrets.of(tmp_path)
    key_in(tmp_path)
    assert mode_of(tmp_path / "secrets.json") == mode_of(tmp_path / "receipts.key") == 0o600


@pytest.fixture
def shared_folder() -> Iterator[Path]:
    """A folder that every user of the machine can enter."""
    with tempfile.TemporaryDirectory(dir="/tmp", prefix="shoal-test-") as name:
        os.chmod(name, 0o755)
        yield Path(name)


def as_another_user(work: Callable[[], object]) -> str:
    """What a function returns in a process of another user, as text."""
    reading, writing = os.pipe()
    if (child := os.fork()) == 0:
        try:
            os.setgid(65534)
            os.setuid(65534)
            os.write(writing, repr(work()).encode())
        except BaseException as problem:
            os.write(writing, repr(problem).encode())
        finally:
            os._exit(0)
    os.close(writing)
    with open(reading) as told:
        found = told.read()
    os.waitpid(child, 0)
    return found


def ways_to_open(path: Path) -> list[int]:
    """The modes in which this user can open a file."""
    found = []
    for flags in (os.O_RDONLY, os.O_WRONLY, os.O_RDWR):
        with suppress(PermissionError):
            os.close(os.open(path, flags))
            found.append(flags)
    return found


def test_no_other_user_can_hold_a_lock_and_what_it_cannot_know_is_unknown(shared_folder: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("only root can start a process of another user")
    (shared_folder / "lock").touch(0o644)  # as an earlier version left it
    lock = FolderLock(shared_folder)
    lock.take()
    assert mode_of(shared_folder / "lock") == 0o600
    assert is_held(shared_folder) is True
    assert as_another_user(lambda: (ways_to_open(shared_folder / "lock"), is_held(shared_folder))) == "([], None)"
    lock.release()
    assert is_held(shared_folder) is False
    assert is_held(shared_folder / "nowhere") is False


HOLDS_THE_LOCK = """
import fcntl, os, sys
os.setgid(65534); os.setuid(65534)
held = open(sys.argv[1])
fcntl.flock(held, fcntl.LOCK_EX)
print("held", flush=True)
sys.stdin.read()
"""


def test_a_lock_that_another_user_held_already_can_be_deleted_and_is_then_safe(shared_folder: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("only root can start a process of another user")
    path = shared_folder / "lock"
    path.touch(0o644)  # as an earlier version left it
    command = [sys.executable, "-c", HOLDS_THE_LOCK, str(path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == "held\n"
        lock = FolderLock(shared_folder)
        with pytest.raises(ShoalError, match=f"another user holds {path}, which all could open until now: delete it"):
            lock.take()
        assert mode_of(path) == 0o600
        path.unlink()
        lock.take()
        lock.release()
        other.communicate("")
