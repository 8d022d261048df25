"""A class trains through a database: every sample counts once, whatever happens to whom."""

from __future__ import annotations

import io
import json
import threading
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from PIL import Image

from shoal.cli.main import main
from shoal.config.load import resolve_data
from shoal.coordinator.audit.files import gather_from, gather_receipts
from shoal.coordinator.audit.run import audit
from shoal.coordinator.audit.units import LagRule
from shoal.errors import ShoalError
from shoal.reporters.progress import progress_for
from shoal.runs import worker_run as joining
from shoal.runs.connections import DatabaseConnection
from shoal.runs.coordinator_run import CoordinatorLoop
from shoal.runs.coordinator_setup import ReadyCoordinator
from shoal.runs.worker_run import JoinedWorker
from shoal.transports.postgres.access import connect
from shoal.transports.postgres.queries import look, trail
from shoal.updates.privacy import Accountant, sample_level_multiplier
from tests.support.classroom import DIGITS, School, all_there
from tests.support.processes import HANG_S

SIZES = {"image_size": 16, "generator_features": 4, "discriminator_features": 4, "latent_dim": 8}
GAN: dict[str, Any] = {"model": {"kind": "dcgan", **SIZES}, "task": "gan"}


def train(coordinating: ReadyCoordinator) -> dict[str, Any]:
    try:
        return coordinating.loop.train()
    finally:
        coordinating.loop.server.close()


def violations(school: School) -> list[str]:
    with connect(school.access) as connection:
        found = trail(connection)
    problems: list[str] = []
    receipts = sorted((school.folder / "run" / "workers").glob("*.jsonl"))
    return audit(gather_from(gather_receipts(receipts, [], problems), *found), problems, units=True, lags=LagRule(None)).violations


def covered(school: School) -> Counter[tuple[int, int]]:
    """How often each (epoch, batch) is in the weights."""
    lines = [json.loads(entry) for (entry,) in school.ask("SELECT entry FROM shoal.ledger ORDER BY line")]
    counted: Counter[tuple[int, int]] = Counter()
    for line in lines:
        for one in line.get("from", ()):
            counted.update((one[6], batch) for batch in range(one[7] - one[8], one[7]))
    return counted


def test_every_batch_of_every_epoch_is_learned_from_once(school: School) -> None:
    coordinating = school.coordinate({"training": {"batch_size": 32, "epochs": 2, "optimizer": {"name": "Adam", "learning_rate": 0.01}}})
    for number in range(3):
        school.worker(f"w{number}")
    summary = train(coordinating)
    school.finish()
    per_epoch = coordinating.loop.recorder.epochs.batches_per_epoch
    assert covered(school) == Counter({(epoch, batch): 1 for epoch in range(2) for batch in range(per_epoch or 0)})
    assert summary["samples"] == 2 * 1437  # the last batch of an epoch is smaller, and is not left out
    assert summary["status"] == "completed"
    assert violations(school) == []
    counts = school.balance()
    assert counts["completed"] == summary["contributions"]["accepted"]
    assert counts.get("pending", 0) == counts.get("claimed", 0) == 0


def test_a_round_and_the_end_of_the_results_that_it_is_made_of_are_one_transaction(school: School) -> None:
    """What counts as waiting for a round is what the database still holds: a result must not be seen there and in a closed round."""
    coordinating = school.coordinate({"strategy": {"kind": "workunits", "batches_per_unit": 4, "units_per_update": 2}})
    leases = coordinating.loop.driver.leases
    assert leases is not None
    consume, consumed = leases.database.consume, list[tuple[int, int]]()

    def consume_checked(request: Any) -> None:
        header = request.message.header
        consumed.append((header["epoch"], header["start"]))
        assert covered(school)[consumed[-1]] == 0, "another connection sees the closed round already"
        consume(request)

    leases.database.consume = consume_checked  # type: ignore[method-assign]
    for number in range(2):
        school.worker(f"w{number}")
    train(coordinating)
    school.finish()
    assert {covered(school)[place] for place in consumed} == {1}
    assert school.ask("SELECT * FROM shoal.contributions") == []


def test_with_more_workers_than_a_round_needs_late_results_are_dropped_and_counted(school: School) -> None:
    coordinating = school.coordinate({"strategy": {"kind": "workunits", "batches_per_unit": 1, "units_per_update": 3}})
    seen: list[dict[str, int]] = []
    stop, looked, turns = threading.Event(), threading.Semaphore(0), iter(range(4))

    def wait_for_a_look() -> None:
        """In the coordinator's first turns: a busy machine would let the watcher look too seldom."""
        assert next(turns, None) is None or looked.acquire(timeout=HANG_S)

    coordinating.loop.on_tick = wait_for_a_look

    def watch() -> None:
        while not stop.wait(0.05):
            seen.append(school.balance())
            looked.release()

    watcher = threading.Thread(target=watch)
    watcher.start()
    for number in range(8):
        school.worker(f"w{number}")
    try:
        train(coordinating)
    finally:
        stop.set()
        watcher.join()
    school.finish()
    assert len(seen) > 3
    assert violations(school) == []
    told = sum(worker.worker.counts["rejected"] for worker in school.workers if worker.worker)
    assert school.balance()["dropped"] == told
    assert set(covered(school).values()) == {1}


def test_one_worker_with_one_unit_a_round_is_one_process_alone(school: School) -> None:
    """The same batches in the same order, so the same weights; the gradient makes a detour through the database."""
    from shoal.runs.training.train_alone import prepare as prepare_alone

    settings = {"strategy": {"kind": "workunits", "batches_per_unit": 1, "units_per_update": 1}}
    coordinating = school.coordinate(settings)
    school.worker("only")
    train(coordinating)
    school.finish()
    data = {"source": {"kind": "builtin", "name": "digits"}, "loader": {"drop_last": False}}
    local = resolve_data(
        {"model": DIGITS["model"], "training": DIGITS["training"], "data": data}, name="alone", dialect="shoal", environ={}
    )
    alone = prepare_alone(local, run_dir=str(school.folder / "alone"), resume=False, reporters=[])
    alone.train()
    for name, value in alone.engine.weights().items():
        assert torch.equal(value, coordinating.loop.engine.weights()[name]), name


def test_a_coordinator_goes_on_from_the_database_alone(school: School) -> None:
    epochs = {"training": {"batch_size": 32, "epochs": 3, "optimizer": {"name": "Adam", "learning_rate": 0.01}}}
    first = school.coordinate(epochs)
    loop = first.loop
    loop.on_tick = lambda: setattr(loop.recorder, "stopping", "interrupted") if loop.step >= 5 else None
    school.worker("w0")
    school.worker("w1")
    train(first)
    assert 5 <= loop.step < loop.engine.total_steps
    with pytest.raises(ShoalError, match="holds another run"):
        school.coordinate(epochs, run_dir="second")
    with pytest.raises(ShoalError, match="other settings"):
        school.coordinate({"training": {"batch_size": 16, "epochs": 3}}, resume=True, run_dir="third")
    again = school.coordinate(epochs, resume=True, run_dir="elsewhere")
    assert again.loop.step == loop.step
    for name, value in loop.engine.weights().items():
        assert torch.equal(value, again.loop.engine.weights()[name]), name
    assert train(again)["status"] == "completed"
    school.finish()
    assert violations(school) == []
    assert len(covered(school)) == 3 * 45
    school.balance()


def test_with_a_codec_students_read_what_changed(school: School) -> None:
    """And after the coordinator began anew, all of it: a student never has anything but what hangs out."""
    codec = {"updates": {"codec": {"kind": "int8"}}, "training": {"batch_size": 32, "epochs": 4}}
    read: list[str] = []
    apart: list[float] = []
    exact: dict[int, torch.Tensor] = {}
    both = all_there(2)

    def note_exactly(loop: CoordinatorLoop) -> CoordinatorLoop:
        publish = loop.server.publish

        def noted(version: int, *notice: Any) -> None:
            exact[version] = loop.engine.vector.clone()
            publish(version, *notice)

        loop.server.publish = noted  # type: ignore[method-assign]
        return loop

    def watch(joined: JoinedWorker) -> None:
        both(joined)
        assert joined.worker is not None
        weights, name = joined.worker.weights, joined.name
        load = weights.load

        def loaded(news: Any) -> bool:
            new = load(news)
            if new:
                read.append(f"{name} {news.header['weights']}")
                apart.append(float((weights.base - exact[weights.version]).abs().max()))
            return new

        weights.load = loaded  # type: ignore[method-assign]

    def interrupt() -> None:
        """When each has read differences: which of them works more is this machine's choice."""
        more = read.count("w0 difference") - read.count("w0 full")
        if first.loop.step >= 8 and more > 3 and "w1 difference" in read:
            first.loop.recorder.stopping = "interrupted"

    first = school.coordinate(codec)
    note_exactly(first.loop).on_tick = interrupt
    for number in range(2):
        school.worker(f"w{number}", watch)
    train(first)
    ((most,),) = school.ask(
        "SELECT sum(f.bytes) FROM shoal.published_frames f WHERE EXISTS (SELECT FROM shoal.weights w WHERE f.id = ANY (w.frames))"
    )
    assert most < 3 * 4 * first.loop.engine.vector.numel(), "all of them once, and differences of no more than that"
    again = note_exactly(school.coordinate(codec, resume=True, run_dir="elsewhere").loop)
    assert again.train()["status"] == "completed"
    again.server.close()
    school.finish()
    assert violations(school) == []
    assert {"w0 full", "w0 difference", "w1 difference"} <= set(read)
    assert read.count("w0 difference") > read.count("w0 full")
    assert max(apart) < 0.1


def test_the_unit_of_a_worker_that_died_goes_to_another_when_its_lease_ends(school: School) -> None:
    strategy = {"kind": "workunits", "batches_per_unit": 15, "units_per_update": 3, "lease_timeout_s": 1.0, "max_retries": 99}
    coordinating = school.coordinate({"strategy": strategy})
    taken = threading.Event()

    def die(worker: JoinedWorker) -> None:
        def vanish() -> None:
            taken.set()
            worker.heartbeats.close()
            worker.connections[0].close()
            raise SystemExit

        assert worker.worker is not None
        worker.worker._step = vanish  # type: ignore[method-assign]

    training = threading.Thread(target=train, args=(coordinating,))
    training.start()
    dead = school.worker("dead", die)
    assert taken.wait(HANG_S)
    dead.join(HANG_S)
    school.problems.clear()
    school.worker("w0")
    school.worker("w1")
    training.join(HANG_S)
    school.finish()
    assert set(covered(school).values()) == {1}
    assert len(covered(school)) == 45
    (failures,) = school.ask("SELECT sum(failed) FROM shoal.workers WHERE name = 'dead'")
    assert failures[0] >= 1


def test_a_student_whose_units_take_longer_than_a_lease_takes_part(school: School) -> None:
    """Signs of life come beside the computing: each unit takes more than twice as long as its lease, and none is lost."""
    strategy = {"kind": "workunits", "batches_per_unit": 15, "units_per_update": 3, "lease_timeout_s": 100.0}
    coordinating = school.coordinate({"strategy": strategy})

    def compute_slowly(worker: JoinedWorker) -> None:
        assert worker.worker is not None
        make = worker.worker.producer.make

        def slowly() -> Any:
            for _ in range(3):
                school.ask("UPDATE shoal.units SET deadline = deadline - interval '70 seconds' WHERE state = 'claimed' RETURNING 1")
                worker.heartbeats.send()
            return make()

        worker.worker.producer.make = slowly  # type: ignore[method-assign]

    school.worker("slow", compute_slowly)
    assert train(coordinating)["status"] == "completed"
    school.finish()
    assert set(covered(school).values()) == {1}
    assert school.ask("SELECT completed, late, failed FROM shoal.workers") == [(3, 0, 0)]


def test_a_unit_nobody_can_do_is_given_up_and_the_epoch_ends(school: School) -> None:
    strategy = {"kind": "workunits", "batches_per_unit": 2, "units_per_update": 3, "max_retries": 1}
    coordinating = school.coordinate({"strategy": strategy})

    def break_one(worker: JoinedWorker) -> None:
        assert worker.worker is not None
        feed_for = worker.worker.feed_for

        def poisoned(seat: int, epoch: int, start: int) -> Any:
            feed = feed_for(seat, epoch, start)
            if start == 4:
                load = feed._units.batch
                feed._units = SimpleNamespace(
                    batch=lambda *place: {name: value * float("nan") if name == "image" else value for name, value in load(*place).items()}
                )
            return feed

        worker.worker.feed_for = poisoned

    for number in range(2):
        school.worker(f"w{number}", break_one)
    summary = train(coordinating)
    school.finish()
    assert summary["status"] == "completed"
    assert sorted(set(range(45)) - {batch for _, batch in covered(school)}) == [4, 5]
    assert violations(school) == []
    assert school.balance()["failed"] == 1


def test_rubbish_from_a_student_spoils_nothing(school: School) -> None:
    coordinating, lied = school.coordinate(), threading.Event()

    def lie(worker: JoinedWorker) -> None:
        board = worker.connections[0]
        assert isinstance(board, DatabaseConnection)
        submit, lies = board.desk.submit, iter([{"samples": -1}, {"extra": 1}, {"weight": "much"}, {"metrics": {"loss": [1]}}, None])

        def lying(unit: Any, header: dict[str, Any], frames: Any) -> str:
            change = next(lies, {})
            try:
                return submit(unit, header | change, frames) if change is not None else submit(unit, header, [b"no update at all"])
            finally:
                lied.set()

        board.desk.submit = lying  # type: ignore[method-assign]

    def begin(worker: JoinedWorker) -> None:
        assert lied.wait(HANG_S), "one alone could do all the work before"

    school.worker("liar", lie)
    school.worker("honest", begin)
    train(coordinating)
    for thread in school.threads:
        thread.join(HANG_S)
    in_quarantine = [problem for problem in school.problems if "in quarantine" in str(problem)]
    school.problems = [problem for problem in school.problems if problem not in in_quarantine]
    school.finish()
    assert len(in_quarantine) <= 1, "the third lie shuts the liar out, unless the run is over before"
    assert set(covered(school).values()) == {1}
    assert len(covered(school)) == 45
    assert 1 <= coordinating.loop.coordinator.state.contributions["malformed"] <= 5  # some may have come too late to be looked at
    school.balance()


def test_the_teacher_sees_the_class_from_the_database_alone(school: School, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    from shoal.reporters.sinks import Blackboard
    from shoal.transports.postgres import schema

    with connect(school.access) as connection:
        schema.grant(connection, "teacher", "secret", "reader")
    coordinating = school.coordinate(GAN, {"training": {"batch_size": 64, "epochs": 1}, "logging": {"every_steps": 1}})
    coordinating.loop.recorder.reporters.append(Blackboard())
    both = all_there(2)
    for number in range(2):
        school.worker(f"w{number}", both)
    train(coordinating)
    school.finish()
    teacher = school.access._replace(user="teacher", password="secret")
    with connect(teacher) as connection:
        view = look(connection)
    assert view is not None
    assert view.figures["samples"] == 1437
    assert main(["status", teacher.address, "--grid", str(tmp_path / "grid.png")]) == 0
    output = capsys.readouterr().out
    assert "1,437 images" in output
    assert "generator_loss" in output
    assert "has ended: completed" in output
    assert {"w0", "w1"} <= set(output.split())
    assert (tmp_path / "grid.png").read_bytes().startswith(b"\x89PNG")


def test_a_table_on_the_terminal_leaves_the_coordinators_connection_alone(school: School, monkeypatch: pytest.MonkeyPatch) -> None:
    terminal: Any = io.StringIO()
    terminal.isatty = lambda: True
    shown = progress_for(terminal, "INFO", cluster=True)
    shown.refreshes_per_s = 100.0
    coordinating = school.coordinate({"training": {"batch_size": 32, "epochs": 1}})
    board: Any = coordinating.loop.members.board
    read, threads = board.workers, set[threading.Thread]()
    monkeypatch.setattr(board, "workers", lambda: threads.add(threading.current_thread()) or read())
    coordinating.loop.recorder.reporters.append(shown)
    school.worker("mia")
    train(coordinating)
    school.finish()
    assert "mia" in terminal.getvalue()
    assert threads == {threading.current_thread()}


def test_statistics_of_the_networks_reach_the_coordinator(school: School) -> None:
    coordinating = school.coordinate(GAN, {"training": {"batch_size": 64, "epochs": 1}})
    before = {name: value.clone() for name, value in coordinating.loop.engine.weights().items() if "running_mean" in name}
    school.worker("w0")
    train(coordinating)
    school.finish()
    after = coordinating.loop.engine.weights()
    assert before
    assert all(not torch.equal(value, after[name]) for name, value in before.items())
    assert all(float(after[name].abs().max()) > 1e-4 for name in before)


@pytest.mark.parametrize("strategy", ["syncps", "async", "edp"])
def test_other_strategies_go_through_the_database_too(school: School, strategy: str, capsys: pytest.CaptureFixture[str]) -> None:
    from shoal.reporters.sinks import Blackboard
    from shoal.runs.connections import JoinOptions, TransportConnection

    coordinating = school.coordinate({"strategy": {"kind": strategy}, "logging": {"every_steps": 5}}, workers=2)
    coordinating.loop.recorder.reporters.append(Blackboard())
    joined: list[Any] = []
    both = all_there(2)

    def work(name: str) -> None:
        worker = JoinedWorker(JoinOptions(school.student.address, "", None, name=name, patience_s=HANG_S), lambda text: None)
        worker.prepare()
        joined.append(worker)
        both(worker)
        worker.work()

    threads = [threading.Thread(target=work, args=(f"w{number}",), daemon=True) for number in range(2)]
    for thread in threads:
        thread.start()
    summary = train(coordinating)
    for thread in threads:
        thread.join(HANG_S)
    assert all(isinstance(worker.connections[0], TransportConnection) for worker in joined)
    assert summary["status"] == "completed"
    assert main(["status", school.access.address]) == 0
    shown = capsys.readouterr().out
    assert {"w0", "w1", "accepted"} <= set(shown.split())
    assert "units" not in shown
    assert school.ask("SELECT * FROM shoal.orphans()") == []


def test_students_hear_of_an_end_that_makes_no_new_weights(school: School) -> None:
    """The rule needs results of three, and two have come: when no unit is left, what they handed in will never be enough."""
    coordinating = school.coordinate({"updates": {"aggregation": {"kind": "krum", "byzantine": 0}}})
    for name in ("ada", "bob"):
        school.worker(name)
    train(coordinating)
    school.finish()  # of themselves: nobody stops them
    assert coordinating.loop.coordinator.state.version == 0


def test_what_privacy_has_cost_counts_every_unit_that_was_handed_in(school: School) -> None:
    private = {"updates": {"clip_norm": 1.0, "privacy": {"enabled": True, "noise_multiplier": 1.0, "unit": "contribution"}}}
    loop = school.coordinate(private).loop
    school.worker("ada")
    summary = loop.train()
    school.finish()
    spent = loop.privacy.epsilon()
    loop.server.close()
    units, late = summary["contributions"]["accepted"], school.ask("SELECT sum(late + cancelled)::int FROM shoal.workers")[0][0]
    expected = Accountant(sample_level_multiplier(1.0), loop.privacy.sampling_rate, loop.run.updates.privacy.delta)
    expected.record("units", units + late)
    assert units > 0
    assert spent == expected.spent() > 0


def test_a_student_without_the_images_gets_them_from_the_class(school: School, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The teacher has a folder of pictures; a student's computer looks for it and finds nothing."""
    folder = tmp_path / "teacher" / "pictures"
    for label in ("zero", "one"):
        (folder / label).mkdir(parents=True)
        for number in range(24):
            Image.new("L", (8, 8), number).save(folder / label / f"{number}.png")
    source = {"source": {"kind": "images", "path": "pictures", "serve": True}}
    monkeypatch.chdir(folder.parent)
    coordinating = school.coordinate({"data": source, "training": {"batch_size": 8}, "strategy": {"units_per_update": 1}}, workers=1)
    (tmp_path / "student").mkdir()
    monkeypatch.chdir(tmp_path / "student")
    school.worker("ann")
    train(coordinating)
    school.finish()
    assert not Path("pictures").exists()
    assert set(covered(school).values()) == {1}


def test_a_students_plain_log_says_how_it_goes(school: School, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is told with signs of life. Here there is one after every batch."""
    monkeypatch.setattr(joining, "_PROGRESS_EVERY_S", 0.0)
    coordinating, told = school.coordinate(workers=1), list[str]()

    def listen(worker: JoinedWorker) -> None:
        worker.sender.report = told.append
        assert worker.worker is not None
        wanted = worker.worker.still_wanted

        def wanted_after_a_beat(unit: Any) -> bool:
            worker._heartbeat()
            return wanted(unit)

        worker.worker.still_wanted = wanted_after_a_beat  # type: ignore[method-assign]

    school.worker("ann", listen)
    train(coordinating)
    school.finish()
    assert [line for line in told if "of work accepted" in line and "at version" in line]
