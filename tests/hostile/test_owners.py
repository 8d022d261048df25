"""The owner of a live coordinator gives orders as they are typed, from its folder or with a copy of owner.json; nobody else does."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from pathlib import Path
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import pytest

from shoal.cli.main import main
from shoal.config.schema.cluster import Coordinator as CoordinatorSettings
from shoal.coordinator.audit.files import gather
from shoal.coordinator.audit.run import audit
from shoal.runs.folder.run_reader import complete_status
from shoal.runs.invitation import Invitation
from shoal.runs.monitoring.prometheus import metrics_page
from shoal.runs.owner import OwnerFile, read_owner_file, write_owner_file, write_public_address
from shoal.worker.session import SessionEndedError
from tests.support.eventually import eventually
from tests.support.live_coordinator import TOKEN, Honest, Live
from tests.support.transport_harness import KEYS

STATUS = {"schema": 2, "run": "mine", "strategy": "async", "members": [], "state": "running"}


class Owned(Live):
    """A coordinator that its owner gives orders to, over an encrypted line, in a folder that looks like a run's."""

    def begin(self, resume: bool) -> None:
        super().begin(resume)
        key = write_owner_file(self.folder, Invitation(self.server.address, TOKEN, KEYS.public))
        self.coordinator.owner_commands.plan = self.coordinator.plan._replace(owner_key=key)
        self.driver.deps = self.driver.deps._replace(status=lambda: json.dumps(STATUS).encode())


@pytest.fixture
def live(tmp_path: Path) -> Iterator[Owned]:
    (tmp_path / "config.yaml").write_text("dialect: shoal\n")
    (tmp_path / "status.json").write_text(json.dumps(STATUS | {"pid": os.getpid(), "at": time.time()}))
    made = Owned(tmp_path, secret_key=KEYS.secret)
    yield made
    made.end()


@pytest.fixture
def shoal(capsys: pytest.CaptureFixture[str]):
    def call(*words: object) -> tuple[int, str]:
        code = main([str(word) for word in words])
        told = capsys.readouterr()
        return code, told.out + told.err

    return call


def worker(live: Live, name: str) -> Honest:
    return Honest(live, name, server_key=KEYS.public)


def test_the_owner_pauses_and_goes_on_from_the_folder_or_with_a_copy_of_its_file(live: Owned, shoal, tmp_path: Path) -> None:
    copy = tmp_path / "elsewhere.json"
    copy.write_text((live.folder / "owner.json").read_text())
    assert (live.folder / "owner.json").stat().st_mode & 0o77 == 0
    assert shoal("pause", live.folder) == (0, "the owner pauses the run: workers wait\n")
    assert live.coordinator.state.paused
    assert shoal("pause", copy) == (0, "the run is paused already\n")
    live.restart()
    assert live.coordinator.state.paused, "also after a crash"
    assert any("is paused, as its owner wanted" in note for note in live.notes)
    assert shoal("resume", live.folder)[0] == 0
    assert worker(live, "ada").step() == "accepted"
    copy.write_text((live.folder / "owner.json").read_text())  # this test's coordinator comes back at another port
    code, told = shoal("status", copy)
    assert (code, "mine: async" in told) == (0, True)
    assert shoal("stop", copy)[0] == 0
    eventually(lambda: live.coordinator.owner_commands.stops)


def test_a_worker_is_shown_out_and_hears_why_and_the_audit_tells_it(live: Owned, shoal) -> None:
    eve, ada = worker(live, "eve"), worker(live, "ada")
    assert eve.step() == "accepted"
    assert shoal("evict", live.folder, "eve") == (0, "the owner keeps eve out\n")
    with pytest.raises(SessionEndedError, match="the run's owner keeps eve out"):
        eve.step()
    assert ada.step() == "accepted"
    code, told = shoal("evict", live.folder, "nobody")
    assert (code, "there is no worker nobody to keep out; ada" in told) == (2, True)
    live.restart()
    assert live.coordinator.state.evicted.keys() == {"eve"}
    problems: list[str] = []
    report = audit(gather(live.folder, [], problems), problems)
    assert report.violations == []
    assert any("the owner keeps out eve" in line for line in report.checked)
    assert shoal("evict", live.folder, "eve", "--undo")[0] == 0


def test_a_copy_of_an_owner_file_names_the_address_that_other_machines_reach(tmp_path: Path) -> None:
    write_owner_file(tmp_path, Invitation("tcp://192.168.1.5:7000", TOKEN, KEYS.public))
    write_public_address(tmp_path, "class.example:9000")
    assert OwnerFile.read(tmp_path / "owner.json").address == "tcp://192.168.1.5:7000", "this machine asks the address where it listens"
    copy = tmp_path / "copy.json"
    copy.write_bytes((tmp_path / "owner.json").read_bytes())
    assert read_owner_file(copy).address == "tcp://class.example:9000"
    write_owner_file(tmp_path, Invitation("tcp://192.168.1.5:7000", TOKEN, KEYS.public))
    assert read_owner_file(tmp_path / "owner.json").address == "tcp://192.168.1.5:7000"


def test_whoever_has_the_run_token_and_another_key_orders_nothing(live: Owned, shoal, tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.mkdir()
    write_owner_file(other, Invitation(live.server.address, TOKEN, KEYS.public))
    for words in (("pause", other / "owner.json"), ("stop", other / "owner.json"), ("status", other / "owner.json")):
        code, told = shoal(*words)
        assert (code, "orders are taken from the run's owner alone" in told) == (2, True)
    assert not live.coordinator.state.paused
    assert not live.coordinator.owner_commands.stops


def test_what_cannot_be_ordered_is_said_in_a_line(live: Owned, shoal, tmp_path: Path) -> None:
    over = tmp_path / "over"
    over.mkdir()
    (over / "config.yaml").write_text("dialect: shoal\n")
    (over / "metrics.jsonl").write_text("")
    said = {"nowhere": "name a run's folder", str(over): "has no coordinator", str(tmp_path / "config.yaml"): "is not a valid owner file"}
    for run, words in said.items():
        code, told = shoal("stop", run)
        assert (code, words in told, "Traceback" in told) == (2, True, False), told
    (over / "summary.json").write_text('{"format": 1, "status": "completed"}')
    assert "is over (completed)" in shoal("pause", over)[1]


def test_prometheus_reads_a_coordinators_figures_and_from_elsewhere_needs_a_token(tmp_path: Path) -> None:
    told: list[str] = []
    status = lambda: complete_status(STATUS | {"samples": 7})  # noqa: E731

    def read(address: str, token: str = "") -> str:
        with urlopen(Request(address, headers={"Authorization": f"Bearer {token}"}), timeout=60) as answer:
            return str(answer.read().decode())

    for host in ("127.0.0.1", "0.0.0.0"):
        settings = CoordinatorSettings(metrics_port=0, metrics_host=host)
        with metrics_page(settings, tmp_path, status, told.append):
            address = told[-1].split()[3]
            token = (tmp_path / "metrics-token").read_text() if host == "0.0.0.0" else ""
            assert f'shoal_samples_total{{run="{tmp_path.name}"}} 7' in read(address, token)
            for wrong, code in ((address.replace("/metrics", "/"), 404), *(((address, 401),) if token else ())):
                with pytest.raises(HTTPError) as refused:
                    read(wrong)
                assert refused.value.code == code
            if token:
                with pytest.raises(HTTPError) as refused:
                    read(address, "another")
                assert refused.value.read().startswith(b"the token is wrong")
    with metrics_page(CoordinatorSettings(), tmp_path, status, told.append):
        assert len(told) == 2, "nothing is shown unless the settings say so"
