"""`shoal invite` as it is typed: it lets one person's workers in, and out again, while the coordinator is running."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from shoal.cli.main import main
from shoal.coordinator.audit.files import gather
from shoal.coordinator.audit.run import audit
from shoal.coordinator.run_plan import MemberLimits
from shoal.errors import ShoalError
from shoal.runs.invitation import CoordinatorSecrets, GuestList
from shoal.worker.session import SessionEndedError
from tests.support.eventually import eventually
from tests.support.live_coordinator import TOKEN, Honest, Live
from tests.support.transport_harness import KEYS


@pytest.fixture
def live(tmp_path: Path) -> Iterator[Live]:
    guests = GuestList(tmp_path)
    made = Live(tmp_path, MemberLimits(guests=guests), guests=guests.all)
    CoordinatorSecrets(TOKEN, KEYS, address=made.server.address).save(tmp_path)
    yield made
    made.end()


@pytest.fixture
def invite(live: Live, capsys: pytest.CaptureFixture[str]):
    def call(*words: str) -> tuple[int, str]:
        code = main(["invite", "--run", str(live.folder), *words])
        told = capsys.readouterr()
        return code, told.out + told.err

    return call


def token_in(line: str) -> str:
    words = line.split()
    return words[words.index("--token") + 1]


def test_the_printed_line_lets_so_many_workers_in(live: Live, invite) -> None:
    code, told = invite("eve", "--workers", "1")
    assert (code, live.server.address in told) == (0, True)
    assert Honest(live, "laptop", token=token_in(told)).step() == "accepted"
    with pytest.raises(ShoalError, match="the invitation of eve is for 1 workers at a time"):
        Honest(live, "desktop", token=token_in(told))
    assert token_in(invite("eve", "--workers", "2")[1]) == token_in(told), "the same line, with room for more"
    assert Honest(live, "desktop", token=token_in(told)).step() == "accepted"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("../eve",), "is no name for a guest"),
        (("eve", "--workers", "0"), "for one worker at least"),
        (("nobody", "--withdraw"), "nobody has no invitation to this run; invited: ada"),
        (("eve", "--run", "elsewhere"), "there is no folder elsewhere"),
    ],
)
def test_what_cannot_be_done_is_said_in_a_line(invite, words: tuple[str, ...], said: str) -> None:
    assert invite("ada")[0] == 0
    code, told = invite(*words)
    assert code == 2
    assert said in told
    assert "Traceback" not in told


def test_a_withdrawn_guest_is_told_and_let_in_no_longer_and_the_others_go_on(live: Live, invite) -> None:
    token, ada = token_in(invite("eve")[1]), Honest(live, "ada")
    laptop, desktop = (Honest(live, name, token=token) for name in ("laptop", "desktop"))
    assert laptop.step() == desktop.step() == "accepted"
    assert invite("eve", "--withdraw")[0] == 0
    eventually(lambda: list(live.coordinator.members.by_name) == ["ada"])
    eventually(lambda: any("laptop is shown out: the invitation of eve was withdrawn" in note for note in live.notes))
    with pytest.raises(SessionEndedError, match="the invitation of eve was withdrawn"):
        laptop.step()  # over the connection that it has
    with pytest.raises(ShoalError):
        Honest(live, "tablet", token=token)
    assert ada.step() == "accepted"
    assert token_in(invite("eve")[1]) != token, "the old line stays without effect"


def test_a_withdrawal_is_in_journal_and_ledger_and_the_audit_tells_it(live: Live, invite) -> None:
    laptop = Honest(live, "laptop", token=token_in(invite("eve")[1]))
    assert laptop.step() == "accepted"
    invite("eve", "--withdraw")
    eventually(lambda: not live.coordinator.members.by_name)
    live.restart()
    assert live.coordinator.state.sequences == {"laptop": 0}, "what was accepted stays"
    lines = [json.loads(line) for line in (live.folder / "ledger.jsonl").read_text().splitlines()]
    assert [(line["withdrawn"], line["workers"]) for line in lines if "withdrawn" in line] == [("eve", ["laptop"])]
    problems: list[str] = []
    report = audit(gather(live.folder, [], problems), problems)
    assert report.violations == []
    assert any("the invitation of eve was withdrawn: laptop went" in line for line in report.checked)
