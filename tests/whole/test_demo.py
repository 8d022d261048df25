"""`shoal demo`: what it promises on the screen really happens, and in a bounded time."""

from __future__ import annotations

import itertools
import json
import os
import shlex
from pathlib import Path

import pytest

from shoal.cli import demo, demo_alone, demo_scenes
from shoal.cli.demo import activation
from shoal.cli.demo_scenes import SCENES
from shoal.cli.main import main
from shoal.config.load import ConfigFile, parse_override, resolve
from tests.support.eventually import eventually
from tests.support.processes import HANG_S, processes_in, wait_for_line


@pytest.mark.parametrize("name", SCENES)
def test_every_scene_has_good_settings_together_and_alone(name: str) -> None:
    scene = SCENES[name]
    together = resolve(
        [ConfigFile(file) for file in scene.files], [parse_override(text) for text in (*scene.settings, *scene.together)], environ={}
    )
    assert together.ok, together.problems
    if scene.compares:
        overrides = [parse_override(text) for text in (*scene.settings, "strategy.kind=local", "evaluation.strategy=never")]
        assert resolve([ConfigFile(file) for file in scene.files], overrides, environ={}).ok


@pytest.mark.parametrize("name", SCENES)
def test_what_a_demo_proposes_next_works_where_a_config_yaml_is(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What would train is checked here."""
    monkeypatch.chdir(tmp_path)
    Path("config.yaml").write_text("dialect: shoal\n")
    for command in SCENES[name].next.split(" && "):
        words = shlex.split(command)[1:]
        if words[0] not in ("init", "config"):
            words = ["config", "check", *itertools.takewhile(lambda word: not word.startswith("-"), words[1:])]
        assert main(words) == 0, command


@pytest.mark.parametrize("name", SCENES)
def test_only_those_who_have_joined_are_killed(name: str) -> None:
    here = {worker.name for worker in SCENES[name].workers}
    shares = [event.share for event in SCENES[name].events]
    assert shares == sorted(shares)
    for event in SCENES[name].events:
        if event.what == "kill":
            here.remove(event.who)
        elif event.what == "join":
            assert event.who not in here
            here.add(event.who)
    assert here


def test_a_demo_without_its_extra_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(demo_scenes, "find_spec", lambda name: None)
    monkeypatch.chdir(tmp_path)
    assert main(["demo", "classroom", "--run-dir", "x"]) == 2
    assert "pip install 'shoal[classroom]'" in capsys.readouterr().err
    assert main(["demo", "chat", "--run-dir", "x"]) == 2
    assert "pip install 'shoal[serve]'" in capsys.readouterr().err


def test_the_demo_kills_workers_and_the_coordinator_and_nothing_is_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(demo, "_LEAST_S", 1.0)
    for patience in ("_BEGIN_S", "_AFTER_S"):  # a demo has an end on a slow machine, and a test waits for what it asks about
        monkeypatch.setattr(demo, patience, HANG_S)
    assert main(["demo", "--seconds", "3", "--run-dir", "demo"]) == 0
    out = capsys.readouterr().out
    assert "ben is killed" in out
    assert "fay joins late" in out
    assert "it is back with the weights that it last confirmed" in out
    assert "nothing is missing, nothing is counted twice" in out
    assert "accuracy of one process" in out
    assert "reads " in out
    assert "shoal demo classroom" in out
    assert (tmp_path / "demo" / "run" / "workers" / "fay.jsonl").read_text(), "she took part"
    assert main(["demo", "--run-dir", "demo"]) == 2
    assert "holds something already" in capsys.readouterr().err


def test_a_demo_that_is_killed_leaves_no_process_behind(tmp_path: Path) -> None:
    with processes_in(tmp_path) as processes:
        demo = processes.start("demo", "--seconds", "600", "--run-dir", "demo")
        wait_for_line(demo, "join it")
        assert _about(tmp_path / "demo") != []
        demo.kill()
        eventually(lambda: not _about(tmp_path / "demo"))
    assert json.loads((tmp_path / "demo" / "run" / "summary.json").read_text())["status"] == "interrupted", "what was learned is saved"


def _about(folder: Path) -> list[str]:
    """Processes of this machine that were told of a folder, apart from the demo itself."""
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        try:
            line, where = (path / "cmdline").read_text().replace("\0", " "), os.readlink(path / "cwd")
        except OSError:
            continue
        if f" {folder.name}/run" in line and where == str(folder.parent):
            found.append(line)
    return found


def test_the_scene_of_a_reward_has_good_settings(tmp_path: Path) -> None:
    (tmp_path / "vowels.py").write_text(demo_alone._REWARD)
    settings = [word for setting in demo_alone._LEARNING for word in ("--set", setting)]
    words = ["config", "check", "gpu/tiny", "--rlhf_config", "rlhf/test_cpu", *settings, "--plugin", "vowels.py"]
    with processes_in(tmp_path) as processes:  # a plugin stays with the process that has loaded it
        code, said = processes.run(*words)
        assert code == 0, said
        together = ("--set", "rlhf.reward.kind=sum", "--set", "rlhf.reward.parts=[{reward: vowels}, {reward: sentiment}]")
        code, said = processes.run(*words, *together)
        assert code == 0, said


def test_whoever_cannot_type_shoal_yet_is_told_how() -> None:
    assert activation(Path("/clone/.venv"), Path("/clone"), windows=False) == ". .venv/bin/activate"
    assert activation(Path("/elsewhere/env"), Path("/clone"), windows=False) == ". /elsewhere/env/bin/activate"
