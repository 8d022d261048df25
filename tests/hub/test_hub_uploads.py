"""Runs that are pushed to a hub, which answers, refuses, hangs or dies: the run is the same and ends well."""

from __future__ import annotations

import json
import os
import re
import threading
import time
from hashlib import sha256
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from safetensors.torch import load as load_tensors
from safetensors.torch import load_file

from shoal.cli.main import main
from shoal.reporters.background_push import Pusher
from shoal.reporters.hub_repository import PushError
from tests.support.eventually import eventually
from tests.support.fake_hub import FakeHub, Fault
from tests.support.processes import HANG_S, run_python

# The client's own storage upload speaks to its HTTP library in a way that library wants changed.
pytestmark = pytest.mark.filterwarnings("ignore:Use 'content=:DeprecationWarning")
TOKEN = "hf_never_to_be_seen"
GAN = {"kind": "dcgan", "image_size": 16, "latent_dim": 8, "generator_features": 4, "discriminator_features": 4}
GPT = {"kind": "gpt", "hidden_size": 16, "num_layers": 1, "num_heads": 2, "max_seq_len": 16}


def train(*settings: str, repo: str = "me/digits", steps: int = 12, interval: int = 4) -> int:
    given = ["hub.enabled=true", f"hub.repo_id={repo}", f"hub.push_interval={interval}", f"training.max_steps={steps}", *settings]
    return main(["train", "starter", "--run-dir", "run", *(word for setting in given for word in ("--set", setting))])


def checkpoint_of(run: Path) -> dict[str, Any]:
    return load_file(max((run / "checkpoints").glob("step-*")) / "weights.safetensors")


def assert_end_is_there(hub: FakeHub, repo: str = "me/digits") -> None:
    """The weights of the last checkpoint are what the hub has."""
    pushed, own = load_tensors(hub.repos[repo].files["model.safetensors"]), checkpoint_of(Path("run"))
    assert pushed.keys() == own.keys()
    assert all(pushed[name].equal(own[name]) for name in own)


@pytest.mark.parametrize("private", [False, True])
def test_a_run_is_pushed_whole(hub: FakeHub, capsys: pytest.CaptureFixture[str], private: bool) -> None:
    assert train(f"hub.private={str(private).lower()}", "logging.every_steps=1") == 0
    repo = hub.repos["me/digits"]
    assert repo.private == private
    assert repo.commits[-1].summary == "Step 12 of 12"
    assert set(repo.commits[-1].files) == {"README.md", "config.yaml", "data.json", "metrics.jsonl", "model.safetensors", "manifest.json"}
    assert_end_is_there(hub)
    listed = json.loads(repo.files["manifest.json"])["files"]
    assert listed == {name: sha256(content).hexdigest() for name, content in repo.files.items() if name in listed}
    assert set(listed) == set(repo.files) - {"README.md", "manifest.json"}
    assert repo.files["metrics.jsonl"] == Path("run/metrics.jsonl").read_bytes()
    assert repo.files["data.json"] == Path("run/data.json").read_bytes()
    for commit in repo.commits:
        step = int(commit.summary.split()[1])
        assert max(json.loads(line)["step"] for line in commit.files["metrics.jsonl"].splitlines()) == step
    assert f"to {hub.url}/me/digits, last at step 12" in capsys.readouterr().err


def test_the_best_weights_are_pushed_where_they_are_kept(hub: FakeHub, capsys: pytest.CaptureFixture[str]) -> None:
    """Without a learning rate no evaluation is better than the first."""
    first = ("checkpoint.best=loss", "evaluation.strategy=steps", "evaluation.every_steps=6", "training.optimizer.learning_rate=0")
    assert train(*first) == 0
    assert hub.repos["me/digits"].commits[-1].summary == "Step 6 of 12"
    pushed, best = load_tensors(hub.repos["me/digits"].files["model.safetensors"]), load_file("run/best/step-00000006/weights.safetensors")
    assert all(pushed[name].equal(best[name]) for name in best)
    assert "uploading step 6, whose weights are the best of 12, to" in capsys.readouterr().err


def test_every_interval_is_pushed_when_the_hub_keeps_up(hub: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    from shoal.reporters.hub import HubUploads
    from shoal.runs.training.loop import TrainingLoop

    after = HubUploads.step

    def step(self: HubUploads, loop: TrainingLoop) -> None:
        after(self, loop)
        if loop.step % 4 == 0 and loop.step < 12:
            hub.wait_for(lambda: "me/digits" in hub.repos and len(hub.repos["me/digits"].commits) == loop.step // 4)

    monkeypatch.setattr(HubUploads, "step", step)
    assert train() == 0
    assert [commit.summary for commit in hub.repos["me/digits"].commits] == ["Step 4 of 12", "Step 8 of 12", "Step 12 of 12"]
    weights = [commit.files["model.safetensors"] for commit in hub.repos["me/digits"].commits]
    assert len(set(weights)) == 3
    assert hub.paths().count("POST /api/repos/create") == 1


def test_the_card_says_what_it_is_and_how_good(hub: FakeHub) -> None:
    (Path("gan.yaml")).write_text(
        json.dumps({"dialect": "shoal", "model": GAN, "training": {"batch_size": 16}, "evaluation": {"batches": 2}})
    )
    given = ["hub.enabled=true", "hub.repo_id=me/gan", "training.max_steps=6", "evaluation.every_steps=3", "evaluation.strategy=steps"]
    assert main(["train", "gan.yaml", "--run-dir", "run", *(word for setting in given for word in ("--set", setting))]) == 0
    files = hub.repos["me/gan"].files
    assert files["samples/step-00000006.png"] == Path("run/samples/step-00000006.png").read_bytes()
    card = files["README.md"].decode()
    assert card.startswith("---\nlibrary_name: shoal\ntags:\n- shoal\n- dcgan\npipeline_tag: unconditional-image-generation\n---\n")
    assert "![Images it drew](samples/step-00000006.png)" in card
    assert "digits: 1,437 training images" in card
    assert re.search(r"\| discriminator_loss \| [0-9.]+ \|", card)
    assert "kind: dcgan" in card
    names = set(load_tensors(files["model.safetensors"]))
    assert {name.partition(".")[0] for name in names} == {"generator", "discriminator"}


@pytest.mark.parametrize(("there", "wanted"), [(False, True), (True, False)])
def test_a_repository_that_is_there_keeps_its_visibility(
    hub: FakeHub, capsys: pytest.CaptureFixture[str], there: bool, wanted: bool
) -> None:
    from tests.support.fake_hub import Repo

    hub.repos["me/digits"] = Repo(there)
    assert train(f"hub.private={str(wanted).lower()}") == 0
    assert_end_is_there(hub)
    assert hub.repos["me/digits"].private == there
    error = capsys.readouterr().err
    assert error.count("though hub.private is") == 1


class Case(NamedTuple):
    """What goes wrong, and whether the last state gets there all the same."""

    path: str
    status: int | str
    times: int = 1
    arrives: bool = True
    says: str = ""
    headers: dict[str, str] = {}  # noqa: RUF012


CASES = {
    "a bad token": Case("create|models", 401, 99, False, "the hub does not accept the token (401)"),
    "a token that may only read": Case("create", 403, 99, False, "the token may not write to me/digits (403)"),
    "a token that may write but not create": Case("commit", 403, 99, False, "the token may not write to me/digits (403)"),
    "a repository that went away": Case("preupload", 404, 99, False, "there is no me/digits that this token may see (404)"),
    "a bad request": Case("commit", 400, 99, False, "the hub answered 400"),
    "a quota that is used up": Case("create", 429, 1, True, "the hub answered 429", {"Retry-After": "1"}),
    "a quota of the hub's own kind": Case("create", 429, 1, True, "the hub answered 429", {"ratelimit": '"api";r=0;t=1'}),
    "a server in trouble": Case("validate-yaml", 500, 2, True, ""),
    "a server in trouble when it begins": Case("create", 503, 3, True, "the hub answered 503 Service Unavailable"),
    "a commit that fails once": Case("commit", 500, 1, True),
    "a storage that fails once": Case("storage", 503, 1, True),
    "two who commit at once": Case("commit", 412, 1, True, "the hub answered 412"),
    "a request that is never answered": Case("create", "hang", 1, True, "ReadTimeout: timed out"),
    "a commit that is never answered": Case("commit", "hang", 1, True),
    "a connection that ends in the middle": Case("create", "drop", 1, True, "RemoteProtocolError: Server disconnected"),
    "an upload that ends in the middle": Case("storage", "drop", 1, True),
    "a server that dies in the middle of an upload": Case("storage", "die", 1, False, "ConnectError"),
    "a server that dies when it begins": Case("create", "die", 1, False, "ConnectError"),
}


def give_up_once_told(monkeypatch: pytest.MonkeyPatch, reason: str) -> None:
    """A run waits for its last upload until the hub has failed for this reason, however long that takes, and then for a moment."""
    finish = Pusher.finish

    def finish_once_told(self: Pusher, within_s: float) -> None:
        eventually(lambda: any(reason in told for told in list(self._told)))
        finish(self, 0.5)

    monkeypatch.setattr(Pusher, "finish", finish_once_told)


@pytest.mark.parametrize("case", CASES)
def test_whatever_the_hub_does_the_run_ends_well(
    hub: FakeHub, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, case: str
) -> None:
    path, status, times, arrives, says, headers = CASES[case]
    monkeypatch.setattr("shoal.reporters.hub_repository.REQUEST_TIMEOUT_S", 0.5 if status == "hang" else HANG_S)
    if not arrives:
        give_up_once_told(monkeypatch, says)
    hub.fail(path, status, times=times, **headers)
    assert train() == 0
    error = capsys.readouterr().err
    assert says in error
    assert json.loads(Path("run/summary.json").read_text())["status"] == "completed"
    if arrives:
        assert_end_is_there(hub)
        assert "last at step 12" in error
    else:
        assert "nothing of this run is there" in error
        assert not any(repo.commits for repo in hub.repos.values())
    assert not hub.faults or times == 99, "what was to go wrong went wrong"
    assert TOKEN not in error


def test_a_hub_that_never_answers_costs_the_run_nothing_but_the_last_wait(
    hub: FakeHub, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    asks, finish = "POST /api/repos/create", Pusher.finish

    def finish_once_asked(self: Pusher, within_s: float) -> None:
        hub.wait_for(lambda: asks in hub.paths())
        finish(self, 0.5)

    monkeypatch.setattr(Pusher, "finish", finish_once_asked)
    monkeypatch.setattr("shoal.reporters.hub_repository.REQUEST_TIMEOUT_S", 2 * HANG_S)
    hub.fail("create", "hang", times=99)
    assert train(steps=40, interval=1) == 0
    assert "the hub took longer than" in capsys.readouterr().err
    assert json.loads(Path("run/summary.json").read_text())["wall_s"] < HANG_S / 2, "nobody waited for an answer"
    assert hub.paths().count(asks) == 1, "one state under way, one waiting"


def test_there_is_no_hub(hub: FakeHub, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    import socket

    from huggingface_hub import constants

    with socket.socket() as taken:  # bound and not listening: nobody answers there
        taken.bind(("127.0.0.1", 0))
        monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{taken.getsockname()[1]}")
        give_up_once_told(monkeypatch, "ConnectError")
        assert train() == 0
    assert "ConnectError" in capsys.readouterr().err


def test_a_reason_is_told_once_and_the_end_tells_it_again(hub: FakeHub, capsys: pytest.CaptureFixture[str]) -> None:
    hub.fail("create|models", 401, times=999)
    assert train(steps=40, interval=1) == 0
    error = capsys.readouterr().err
    assert error.count("did not get to the hub: the hub does not accept the token") == 1
    assert error.count(f"the end of the run is not at {hub.url}/me/digits: the hub does not accept the token") == 1


def test_the_hub_is_asked_again_after_the_time_it_named(hub: FakeHub) -> None:
    at: list[float] = []
    fault_for = hub.fault_for

    def timed(path: str) -> Fault | None:
        if "create" in path:
            at.append(time.monotonic())  # before it is answered
        return fault_for(path)

    hub.fault_for = timed  # type: ignore[method-assign]
    hub.fail("create", 429, Retry_After="2")
    assert train() == 0
    assert len(at) == 2
    assert at[1] - at[0] >= 2
    assert_end_is_there(hub)


def test_no_secret_is_uploaded(hub: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    password = "classroom-password"
    monkeypatch.setenv("DB_PASSWORD", password)
    places = ["transport.kind=postgres", "transport.host=db.school.example", f"name=a {TOKEN} b", f"logging.project={password}"]
    assert train(*places) == 0
    files = [content for commit in hub.repos["me/digits"].commits for content in commit.files.values()]
    everything = [asked.body for asked in hub.asked] + [asked.path.encode() for asked in hub.asked] + files
    for secret in (TOKEN, password, "db.school.example"):
        assert not any(secret.encode() in content for content in everything), secret
    assert b"a ******** b" in hub.repos["me/digits"].files["README.md"], "where somebody put one, it is masked"
    with_token = [asked.path for asked in hub.asked if TOKEN in str(asked.headers)]
    assert any("commit" in path for path in with_token)
    assert not any("storage" in path for path in with_token), "who stores files gets no token"


def test_weights_that_are_not_finite_stay_here(hub: FakeHub, capsys: pytest.CaptureFixture[str]) -> None:
    assert train("training.optimizer.learning_rate=1e39", "training.clipping.enabled=false", "hub.push_interval=1") == 2
    told = capsys.readouterr().err
    assert re.search(r"step \d+ did not get to the hub: the weights are not finite", told), "a later push may have replaced the first"
    assert not any(repo.commits for repo in hub.repos.values())


def test_a_resumed_run_without_a_token_is_told_before_it_begins(
    hub: FakeHub, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert train() == 0
    monkeypatch.delenv("HF_TOKEN")
    assert main(["train", "--run-dir", "run", "--resume"]) == 2
    assert "export HF_TOKEN" in capsys.readouterr().err


# --- what was pushed can be used ---------------------------------------------------------------------


def python(hub: FakeHub, *arguments: str) -> str:
    environ = os.environ | {
        "HF_ENDPOINT": hub.url,
        "HF_HUB_DISABLE_XET": "1",
        "HF_HOME": str(Path("home").absolute()),
        "OMP_NUM_THREADS": "1",
    }
    done = run_python(list(arguments), env=environ)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_snippet_of_the_card_loads_the_weights(hub: FakeHub) -> None:
    assert train() == 0
    card = hub.repos["me/digits"].files["README.md"].decode()
    (snippet,) = re.findall(r"```python\n(.*?)```", card, re.DOTALL)
    Path("snippet.py").write_text(snippet + "\nprint(*sorted(tensors))")
    assert python(hub, "snippet.py").split() == sorted(checkpoint_of(Path("run")))


@pytest.mark.parametrize("kind", ["gan", "gpt", "mlp"])
def test_the_command_of_the_card_works_on_what_was_downloaded(hub: FakeHub, capsys: pytest.CaptureFixture[str], kind: str) -> None:
    Path("text.txt").write_text("the quick brown fox jumps over the lazy dog. " * 200)
    model: dict[str, Any] = {
        "gan": {"model": GAN},
        "gpt": {"model": GPT, "data": {"source": {"kind": "text", "path": "text.txt"}}},
        "mlp": {},
    }[kind]
    Path("config.yaml").write_text(json.dumps({"dialect": "shoal", "training": {"batch_size": 16}, "evaluation": {"batches": 1}} | model))
    given = ["hub.enabled=true", "hub.repo_id=me/model", "training.max_steps=3"]
    assert main(["train", "config.yaml", "--run-dir", "run", *(word for setting in given for word in ("--set", setting))]) == 0
    files = hub.repos["me/model"].files
    for name, content in files.items():
        place = Path("model") / name
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_bytes(content)
    download, command = re.findall(r"```sh\n(.*?)```", files["README.md"].decode(), re.DOTALL)[0].strip().split("\n")
    assert download == "hf download me/model --local-dir model"
    capsys.readouterr()
    words = re.findall(r'"[^"]*"|\S+', command)
    assert main([word.strip('"') for word in words[1:]]) == 0
    said = capsys.readouterr().out
    assert "step 3" in said or said.startswith("Once") or "accuracy" in said
    if kind == "gpt":
        assert any(name.startswith("tokenizer/") for name in files)
        assert "What it writes:" in files["README.md"].decode()


def test_a_coordinator_pushes_its_versions(hub: FakeHub) -> None:
    given = ["hub.enabled=true", "hub.repo_id=me/digits", "hub.push_interval=5", "training.max_steps=12"]
    settings = [word for setting in given for word in ("--set", setting)]
    python(hub, "-m", "shoal", "train", "starter", "--workers", "2", "--run-dir", "run", *settings)
    assert_end_is_there(hub)
    assert hub.repos["me/digits"].commits[-1].summary == "Step 12 of 12"
    assert "| strategy | `syncps`" in hub.repos["me/digits"].files["README.md"].decode()
    assert "transport:" not in hub.repos["me/digits"].files["config.yaml"].decode()


# --- the thread ---------------------------------------------------------------------------------------


class State(NamedTuple):
    step: int


def test_a_newer_state_takes_the_place_of_the_one_that_waits() -> None:
    sent: list[int] = []
    begun, go_on = threading.Event(), threading.Event()

    def send(state: State) -> None:
        begun.set()
        assert go_on.wait(HANG_S)
        sent.append(state.step)

    pusher = Pusher(send)
    pusher.offer(State(1))
    assert begun.wait(HANG_S)
    for step in (2, 3, 4):
        pusher.offer(State(step))
    go_on.set()
    pusher.finish(HANG_S)
    assert sent == [1, 4]
    assert pusher.pushed_step == 4


def test_what_failed_is_tried_again_with_the_newest_state(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shoal.reporters.background_push.FIRST_WAIT_S", 2.0 * HANG_S)
    tried: list[int] = []

    def send(state: State) -> None:
        tried.append(state.step)
        if len(tried) == 1:
            raise PushError("the weather")

    pusher = Pusher(send)
    pusher.offer(State(1))
    assert "the weather" in pusher.messages.get(timeout=HANG_S)  # said when it knows how long it is to wait
    pusher.offer(State(2))
    pusher.finish(HANG_S)
    assert tried == [1, 2], "the end does not wait for its turn"
    assert pusher.trouble == ""


def test_an_error_nobody_thought_of_does_not_end_the_thread() -> None:
    def send(state: State) -> None:
        if state.step == 1:
            raise ZeroDivisionError("oops")

    pusher = Pusher(send)
    pusher.offer(State(1))
    assert "oops" in pusher.messages.get(timeout=HANG_S)
    pusher.offer(State(2))
    pusher.finish(HANG_S)
    assert pusher.pushed_step == 2
