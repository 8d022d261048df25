"""Whatever is flipped or cut off in a coordinator's files: it comes back exactly, or refuses by name. Nothing is lost in silence."""

from __future__ import annotations

import heapq
import itertools
import os
import random
import shutil
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from shoal.cli.main import main
from shoal.coordinator import Coordinator
from shoal.coordinator.audit.files import gather
from shoal.coordinator.audit.run import audit
from shoal.coordinator.driver import CoordinatorDriver, DriverDeps, SnapshotContent
from shoal.coordinator.durable.journal import journals, path_of
from shoal.coordinator.durable.records import JournalReader
from shoal.errors import ShoalError
from shoal.protocol.messages import Message
from shoal.runs.folder.checkpoint import Checkpoints
from shoal.runs.folder.file_store import FileStore
from shoal.runs.folder.repair import confirmed_in, refuse_forgotten
from tests.coordinator.test_driver import STRATEGIES, Walker, Wire, World
from tests.support.small_cluster import Numbers

DAMAGES = 105
"""Of each strategy below: more than 200 together."""


COPIES = itertools.count()
UNNEEDED = ("lock", "latest", "spare-journal", "receipts.key")


class Killed(NamedTuple):
    """A run that was killed, and a coordinator that came back from what it left."""

    folder: Path
    world: World

    def copy(self, name: str) -> Killed:
        target = self.folder.parent / f"{name} {next(COPIES)}"  # a new one each time: to remove one takes longer than all the rest
        return Killed(Path(shutil.copytree(self.folder, target)), self.world)

    @property
    def state(self) -> Path:
        return self.folder / "coordinator"

    def recovered(self) -> Recovered:
        """Come back, as `runs/coordinator_setup.py` does. Raises ShoalError."""
        learner, store, told = Numbers(2), FileStore(self.state), Told()
        key = store.receipt_key
        coordinator = Coordinator(self.world.plan._replace(receipt_key=key), self.world.strategy, learner)
        capture = SnapshotContent({"vector": learner.vector}, {"coordinator": coordinator.replayed.state_dict(), "ledger": 0})
        around = DriverDeps(Wire(), store, told.published, told.say, Message({}), lambda: capture, lambda: 0.0, lambda: "s", threads=False)
        driver = CoordinatorDriver(coordinator, around)
        try:
            snapshot = store.snapshots.newest(told.say)
            if snapshot is None:
                raise ShoalError(f"no snapshot in {self.state}")
            learner.vector.copy_(snapshot.weights["vector"])
            driver.recover(snapshot)
            refuse_forgotten(self.state, coordinator.state.sequences, confirmed_in(self.folder / "workers", key, told.say))
            return Recovered(learner.vector.clone(), kept(coordinator), store.ledger.path.read_bytes(), told.words)
        finally:
            driver.close()

    def violations(self) -> list[str]:
        found: list[str] = []
        evidence = gather(self.state, sorted((self.folder / "workers").glob("*.jsonl")), found)
        return audit(evidence, found, units=self.world.strategy.feed.leased).violations


class Told:
    def __init__(self) -> None:
        self.words: list[str] = []

    def say(self, text: str) -> None:
        self.words.append(text)

    def published(self, version: Any, replaying: bool) -> None: ...


class Recovered(NamedTuple):
    vector: torch.Tensor
    state: dict[str, Any]
    ledger: bytes
    words: list[str]

    def is_same(self, other: Recovered) -> bool:
        return torch.equal(self.vector, other.vector) and self.state == other.state


def kept(coordinator: Coordinator) -> dict[str, Any]:
    """All but the counts of what was turned away, which are no records."""
    state = dict(vars(coordinator.state))
    state["contributions"] = {"accepted": state["contributions"].get("accepted")}
    return state | {"pending": coordinator.replayed.pending(), "settled": coordinator.replayed.settled.state_dict()}


@pytest.fixture(scope="module", params=["async", "workunits"])
def killed(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Killed:
    """A run that was killed with a round open, after a few snapshots. What it confirmed last is in no version yet."""
    folder = tmp_path_factory.mktemp(request.param) / "run"
    world = World(folder, STRATEGIES[request.param], 11)
    for number in range(3):
        Walker(world, f"w{number}", 1.0 + number)
    for version in (5, 9, 13):
        go_on(world, version)
        world.driver.snapshot()
    go_on(world, 20)
    while not world.driver.coordinator.replayed.pending():
        go_on(world, 0)
    world.driver.close()
    (folder / "config.yaml").write_text(f"dialect: shoal\nstrategy: {{kind: {request.param}}}\n")
    return Killed(folder, world)


def go_on(world: World, version: int) -> None:
    """Until this version; one event at least."""
    while True:
        world.now, _, what = heapq.heappop(world.heap)
        what()
        if world.driver.coordinator.state.version >= version:
            return


def damage(path: Path, chance: random.Random) -> str:
    content = bytearray(path.read_bytes())
    at = chance.randrange(len(content))
    if chance.random() < 0.5:
        content[at] ^= 1 << chance.randrange(8)
        path.write_bytes(content)
        return f"a bit of byte {at} of {len(content)} in {path.name}"
    path.write_bytes(content[:at])
    return f"{path.name} cut off after {at} of {len(content)} bytes"


def test_whatever_is_flipped_or_cut_off_is_made_up_for_or_told(killed: Killed) -> None:
    chance, whole = random.Random(3), killed.copy("whole").recovered()
    files = [
        path for path in killed.state.rglob("*") if path.is_file() and path.name not in ("lock", "latest", "spare-journal", "receipts.key")
    ]
    refusals, exact = dict[str, tuple[Path, str]](), 0
    for number in range(DAMAGES):
        copy = killed.copy("damaged")
        path = copy.folder / chance.choice(files).relative_to(killed.folder)
        what = damage(path, chance)
        try:
            back = copy.recovered()
        except ShoalError as error:
            refusals[what] = (path, str(error))
            continue
        assert back.is_same(whole), f"{what}: silently something else ({number})"
        assert back.ledger == whole.ledger or any("ledger.jsonl" in word for word in back.words), what
        if path.parent.parent.name == "snapshots" and path.parent.name == max(one.name for one in path.parent.parent.iterdir()):
            assert any("trying the one before it" in word for word in back.words), what
        exact += 1
    assert exact > 10
    assert len(refusals) > 10
    for what, (path, error) in refusals.items():
        assert path.name in error or str(path.parent) in error, what
        assert "shoal repair" in error, what


def test_every_byte_of_the_newest_journal_is_checked(killed: Killed) -> None:
    whole = killed.copy("whole").recovered()
    newest = path_of(killed.state, max(journals(killed.state)))
    content = newest.read_bytes()
    refused: list[str] = []
    for at in range(0, len(content), 101):
        copy = killed.copy("flipped")
        changed = bytearray(content)
        changed[at] ^= 0x10
        (copy.state / newest.name).write_bytes(changed)
        audited = copy.violations()
        try:
            back = copy.recovered()
            assert back.is_same(whole)
        except ShoalError as error:
            refused += [str(error)] * bool(audited)  # the audit sees it, too
    assert all(newest.name in error for error in refused)
    assert len(refused) > len(content) // 101 // 2


def test_after_a_repair_the_run_goes_on_and_what_is_lost_has_a_name(killed: Killed, capsys: pytest.CaptureFixture[str]) -> None:
    copy = killed.copy("to repair")
    number = max(journals(copy.state))
    reading = JournalReader(path_of(copy.state, number))
    ends = [reading.end.length for _ in reading]
    content = bytearray(reading.path.read_bytes())
    content[ends[len(ends) // 2] + 40] ^= 1
    reading.path.write_bytes(content)
    with pytest.raises(ShoalError, match=r"is damaged: record .* Put the file back from a backup; or let `shoal repair"):
        copy.recovered()
    assert main(["repair", str(copy.folder)]) == 0
    told = capsys.readouterr().out
    assert "lost: contributions" in told
    assert f"{reading.path.name} is damaged after {len(ends) // 2 + 1} records" in told
    assert main(["audit", str(copy.folder)]) == 0
    told = capsys.readouterr().out
    assert "a repair gave up contributions" in told
    assert "its ledger is written again up to version" in told
    back = copy.recovered()
    assert 0 < back.state["version"] < 20
    assert b'"lost":[["w0"' in back.ledger
    assert copy.violations() == []
    assert (copy.state / "set-aside-1" / reading.path.name).read_bytes() == content, "nothing is deleted"
    assert main(["repair", str(copy.state)]) == 0
    assert "there is nothing to repair" in capsys.readouterr().out
    assert main(["audit", str(copy.folder)]) == 0
    assert "a repair gave up contributions" in capsys.readouterr().out


def test_a_cut_between_two_records_is_told_by_the_ledger_or_by_receipts(killed: Killed) -> None:
    number = max(journals(killed.state))
    reading = JournalReader(path_of(killed.state, number))
    kinds, ends = zip(*[(record["kind"], reading.end.length) for record, _ in reading], strict=True)
    assert kinds[-1] == "accepted", "of a round that is open: the ledger knows nothing of it"
    for end in ends[:-1]:
        copy = killed.copy("cut")
        with path_of(copy.state, number).open("r+b") as file:
            file.truncate(end)
        with pytest.raises(ShoalError, match=r"records at the end of the newest journal .* are gone"):
            copy.recovered()


def test_receipts_that_cannot_be_read_are_told_of(killed: Killed) -> None:
    copy = killed.copy("receipts")
    path = sorted((copy.folder / "workers").glob("*.jsonl"))[0]
    lines = path.read_text().splitlines()
    lines[1] = lines[1].replace('"accepted"', '"accepted')
    lines[3] = lines[3].replace(lines[3][-4], "0" if lines[3][-4] != "0" else "1")
    path.write_text("\n".join([*lines, '["w0", 9']))
    told = copy.recovered().words
    assert any(f"{path} is damaged in line 2, 4: these receipts cannot be read" in word for word in told)
    path.unlink()
    os.mkfifo(path)
    assert any(f"{path} is a named pipe" in word for word in copy.recovered().words)


def test_two_snapshots_are_kept_and_the_newest_may_be_damaged(killed: Killed) -> None:
    copy = killed.copy("snapshots")
    snapshots = Checkpoints(copy.state / "snapshots", 2).all()
    assert len(snapshots) == 2
    state = snapshots[-1] / "state.json"
    state.write_bytes(state.read_bytes().replace(b'"version", 13', b'"version", 12'))
    back = copy.recovered()
    assert back.is_same(killed.copy("whole").recovered())
    assert "state.json does not match its checksum; trying the one before it" in back.words[0]
    path_of(copy.state, min(journals(copy.state))).unlink()
    with pytest.raises(ShoalError, match="is missing"):
        copy.recovered()
    assert main(["repair", str(copy.folder)]) == 0
    assert copy.recovered().state["version"] == 9
