"""How the processes that torchrun started find the first one."""

import threading
import time
from pathlib import Path

import pytest
from torch.distributed import PrefixStore, TCPStore

from shoal.config.load import ConfigFile, parse_override, resolve
from shoal.config.ranks import RankPlace
from shoal.launch import torchrun as fleets
from shoal.launch.torchrun import TorchrunGroup
from shoal.runs.invitation import Invitation
from shoal.runs.owner import write_owner_file


def test_who_is_started_again_hears_of_the_new_start_whoever_comes_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What those before it asked and heard is still in torchrun's store, and is not taken for its own."""
    monkeypatch.setattr(fleets, "_PATIENCE_S", 300.0)
    agent = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    run = resolve([ConfigFile("demo-gpt")], [parse_override("strategy.kind=diloco")], environ={}).run

    def process(rank: int) -> TorchrunGroup:
        fleet = TorchrunGroup(run, RankPlace(rank, 2, rank, 2, address="127.0.0.1", port=agent.port, hosted=True))
        fleet.number = 0  # as in a program of its own
        return fleet

    heard = []
    for start in range(3):
        asked = process(1).rendezvous.get("hello 0 1")
        before = asked and process(1).rendezvous.get(f"answer {asked}")
        first = process(0)
        first.announce(Invitation(f"zmq://127.0.0.1:{5000 + start}", "token", None), tmp_path)
        until = time.monotonic() + 300
        while asked and first.rendezvous.get(f"answer {asked}") == before and time.monotonic() < until:
            time.sleep(0.01)  # the new one sees what the old one asked, before anybody new does
        other = process(1)
        number = other.ask()
        heard.append(other.answer_to(number)[0].address)
        assert other.start == first.start
        for thread in threading.enumerate():
            if thread.name == "fleet":
                thread.join(300)  # torchrun starts nobody before those of the start before are gone
        assert not other.renewed(number)
    assert heard == [f"zmq://127.0.0.1:{5000 + start}" for start in range(3)]
    process(0).announce(Invitation("zmq://127.0.0.1:5003", "token", None), tmp_path)
    until = time.monotonic() + 300
    while not other.renewed(number) and time.monotonic() < until:
        time.sleep(0.01)  # who heard a first process that was about to be ended hears of the next one
    assert other.answer_to(number)[0].address == "zmq://127.0.0.1:5003"
    for thread in threading.enumerate():
        if thread.name == "fleet":
            thread.join(300)


def test_torchruns_store_does_not_tell_other_users_of_the_machine_the_token(tmp_path: Path) -> None:
    agent = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    run = resolve([ConfigFile("demo-gpt")], [parse_override("strategy.kind=diloco")], environ={}).run
    first, other = (TorchrunGroup(run, RankPlace(rank, 2, rank, 2, address="127.0.0.1", port=agent.port, hosted=True)) for rank in (0, 1))
    other.number = first.number
    asked, invitation = other.ask(), Invitation("zmq://127.0.0.1:5000", "the secret token", None)
    write_owner_file(tmp_path, invitation)
    first.announce(invitation, tmp_path)
    assert other.answer_to(asked)[0] == invitation
    for thread in threading.enumerate():
        if thread.name == "fleet":
            thread.join(300)
    stranger = PrefixStore("fleet", TCPStore("127.0.0.1", agent.port, is_master=False, wait_for_workers=False))
    read = [stranger.get(name).decode() for name in (f"hello {first.number} 1", f"answer {asked}", f"heard {asked}")]
    assert asked in read
    assert "secret" not in " ".join(read)
