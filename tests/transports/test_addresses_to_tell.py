"""What a coordinator tells workers to join: addresses that lead to it, wherever they are."""

from __future__ import annotations

import socket
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from shoal.cli.output import show_invitation
from shoal.config.load import resolve_data
from shoal.runs.invitation import Invitation
from shoal.transports import addresses

RUN = resolve_data({"strategy": {"kind": "async"}}, name="test", dialect="shoal", environ={}).run


def shown(capsys: pytest.CaptureFixture[str], host: str, hosts: tuple[str, ...] = ()) -> str:
    with tempfile.TemporaryDirectory() as folder:
        loop = SimpleNamespace(run=RUN, directory=SimpleNamespace(path=Path(folder)))
        started: Any = SimpleNamespace(
            invitation=Invitation(f"tcp://{host}:7000", "token", None), loop=loop, role="", public_address=None, hosts=hosts or [host]
        )
        show_invitation(started, hosts)
    return capsys.readouterr().out


@pytest.mark.skipif(sys.platform not in ("linux", "darwin"), reason="Windows knows all addresses by the machine's name")
def test_without_a_way_out_the_addresses_of_the_network_cards_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(addresses, "_addresses_of_routes", list)
    monkeypatch.setattr(socket, "gethostname", lambda: "nobody-knows-this.invalid")
    assert "127.0.0.1" in addresses._cards().values(), "the loopback card has an address everywhere"
    monkeypatch.setattr(addresses, "_cards", lambda: {"lo": "127.0.0.1", "eth0": "169.254.7.7", "eth1": "10.9.8.7"})
    assert addresses.local_addresses() == ["10.9.8.7", "169.254.7.7"], "an address that the machine gave itself comes last"
    assert addresses.to_tell("0.0.0.0") == "10.9.8.7"


def test_a_machine_with_several_addresses_names_the_others(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(addresses, "local_addresses", lambda: ["192.168.1.2", "10.9.8.7"])
    told = shown(capsys, "192.168.1.2")
    assert told.startswith("workers join with:\n  shoal join tcp://192.168.1.2:7000 ")
    assert "for workers that do not reach the one above: tcp://10.9.8.7:7000" in told
    assert "10.9.8.7" not in shown(capsys, "192.168.1.2", hosts=("192.168.1.2",)), "it does not listen there"


def test_other_machines_are_never_told_to_join_themselves(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(addresses, "local_addresses", lambda: ["127.0.0.1"])
    told = shown(capsys, "127.0.0.1")
    assert told.startswith("workers on this machine join with:\n")
    assert "this machine has no address in a network" in told
    assert "no address in a network" not in shown(capsys, "127.0.0.1", hosts=("127.0.0.1",))


def test_the_card_that_leads_to_this_machine_is_the_loopback_one() -> None:
    name = addresses.interface_of("127.0.0.1")
    assert addresses._cards().get(name or "") == "127.0.0.1"
