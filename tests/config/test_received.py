"""Settings that another machine sent: the table of limits, permissions, and what leaves this machine."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from shoal.config import Run
from shoal.config.environment import usable_cores
from shoal.config.fields import Section, SectionType, TaggedType
from shoal.config.load import Override, resolve_data
from shoal.config.received import Permissions, Redactor, Sent, arguments_for, permissions_for, read_received
from shoal.config.received.limits import TABLE, innermost, sections
from shoal.config.received.settings import local_paths
from shoal.config.show import to_yaml
from shoal.errors import ShoalError
from shoal.runs.folder.run_directory import settings_text

NOTHING = Permissions()


def text_of(**settings: Any) -> str:
    """What a coordinator with these settings sends."""
    given = {"model": {"kind": "mlp"}, "strategy": {"kind": "syncps"}, "cluster": {"num_workers": 1}} | settings
    made = resolve_data(given, name="test", dialect="shoal", environ={})
    assert made.ok, made.problems
    return settings_text(made.run)


def received(permissions: Permissions = NOTHING, *own: str, **settings: Any) -> Run:
    overrides = [Override(*one.split("=", 1), "--set") for one in own]  # type: ignore[arg-type]
    return read_received(text_of(**settings), overrides, permissions).run


def images(path: Path | str) -> dict[str, Any]:
    return {"source": {"kind": "images", "path": str(path)}}


# --- the table -------------------------------------------------------------------------------------------


def settings_of(section: type[Section], path: str) -> Iterator[tuple[type[Section], str, bool]]:
    """The settings of a section, and whether each is a section of its own."""
    for name, field in section.fields().items():
        if not (name == "kind" and path.endswith("]")):
            yield section, name, isinstance(innermost(field.checker), (SectionType, TaggedType))


def test_every_setting_of_the_schema_stands_in_exactly_one_row() -> None:
    homes = sections()
    rows = [(homes[row.section], name) for row in TABLE for name in row.names.split()]
    assert len(rows) == len(set(rows)), "a setting stands in two rows"
    known = {(section, name) for path, section in homes.items() for section, name, _ in settings_of(section, path)}
    assert set(rows) <= known, "a row names a setting that does not exist"
    whole = [(path, name) for row in TABLE for path in (row.section,) for name in row.names.split()]
    covered = tuple(f"{path}.{name}".lstrip(".") for path, name in whole)
    for path, section in homes.items():
        if section.__module__.startswith("shoal.config.schema") and not path.startswith(covered):
            missing = [name for _, name, is_section in settings_of(section, path) if not is_section and (section, name) not in rows]
            assert not missing, f"say in config/received/limits.py what a coordinator may do with {path}: {missing}"


# --- no variables ----------------------------------------------------------------------------------------


def test_variables_in_received_settings_are_plain_text(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_SECRET", "hunter2")
    for name, value in {"HF_TOKEN": "hf_mine", "DB_PASSWORD": "mine", "SHOAL_API_KEY": "mine"}.items():
        monkeypatch.setenv(name, value)
    text = to_yaml({"name": "${MY_SECRET} ${MY_SECRET:-x}"}) + text_of().replace("name: null\n", "", 1)
    loaded = read_received(text, (), NOTHING)
    assert loaded.run.name == "${MY_SECRET} ${MY_SECRET:-x}"
    assert loaded.run.hub.token is None
    assert "mine" not in repr(loaded.run)


def test_a_value_that_looks_like_a_variable_comes_through_as_it_was_sent() -> None:
    assert received(name="${HOME}").name == "${HOME}"


def test_own_settings_may_still_use_own_variables(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("MY_DATA", str(tmp_path))
    run = received(NOTHING, "data.source.path=${MY_DATA}/digits", data=images("/theirs"))
    assert run.data.source is not None
    assert run.data.source.path == f"{tmp_path}/digits"  # type: ignore[attr-defined]


# --- files -----------------------------------------------------------------------------------------------


@pytest.fixture
def start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder in which the worker was started; its user's home folder is beside it."""
    home, folder = tmp_path / "home", tmp_path / "start"
    home.mkdir()
    folder.mkdir()
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.chdir(folder)
    return folder


def test_a_private_file_is_refused_and_the_refusal_names_the_option(start: Path) -> None:
    with pytest.raises(ShoalError, match=r"data\.source\.path is /etc/ssl, .* add --data /etc/ssl"):
        received(data=images("/etc/ssl"))
    assert received(Permissions.of(["/etc/ssl"]), data=images("/etc/ssl/certs")).data.source is not None
    with pytest.raises(ShoalError, match="--data"):
        received(Permissions.of(["/etc/ssl"]), data=images("/etc/ssl/../passwd"))


def test_the_option_that_a_refusal_names_is_safe_to_paste(start: Path) -> None:
    with pytest.raises(ShoalError, match=r"--data '/x; rm -rf y'$"):
        received(data=images("/x; rm -rf y"))


def test_the_folder_of_the_start_may_be_read_without_its_hidden_files(start: Path) -> None:
    for path in ("pictures", start / "pictures", "./pictures/../pictures"):
        assert received(data=images(path)).data.source is not None
    for path in ("../home/pictures", ".ssh", start / ".git" / "config", "~/pictures", "\0"):
        with pytest.raises(ShoalError, match="does not allow"):
            received(data=images(path))


def test_the_home_folder_and_folders_above_it_may_not_be_read(start: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for folder in (start.parent / "home", start.parent, Path("/")):
        monkeypatch.chdir(folder)
        for path in ("pictures", folder / "pictures"):
            with pytest.raises(ShoalError, match="does not allow"):
                received(data=images(path))
        assert received(Permissions.of(["pictures"]), data=images("pictures/2026")).data.source is not None


def test_symbolic_links_lead_nowhere_else(start: Path) -> None:
    private = start.parent / "home" / "private"
    private.mkdir()
    (start / "link").symlink_to(private)
    (start / "pictures").mkdir()
    (start / "pictures" / "one.png").symlink_to(private / "secret")
    (start / "loop").symlink_to(start / "loop")
    for path in ("link", "link/x", "pictures", "loop/x"):
        with pytest.raises(ShoalError, match="does not allow"):
            received(data=images(path))
    assert received(Permissions.of([str(private)]), data=images("pictures")).data.source is not None
    assert received(Permissions.of(["pictures"]), data=images("pictures")).data.source is not None, "named, with its links"


def text_model(**more: Any) -> dict[str, Any]:
    return {"model": {"kind": "moe", "hidden_size": 8, "num_layers": 1, "num_heads": 1, "cross_attention": {"enabled": True}} | more}


@pytest.mark.parametrize(
    "settings",
    [
        {"model": {"kind": "gpt"}, "data": {"source": {"kind": "text", "path": "/private"}}},
        {
            "model": {"kind": "gpt"},
            "data": {"source": {"kind": "text", "path": "/private"}, "streaming": True},
            "training": {"max_steps": 1},
        },
        {"model": {"kind": "gpt"}, "data": {"source": {"kind": "huggingface", "name": "/private"}}},
        {"model": {"kind": "gpt"}, "data": {"source": {"kind": "wikitext", "path": "/private"}}},
        {"model": {"kind": "gpt"}, "data": {"source": {"kind": "snli", "path": "/private"}}},
        {"model": {"kind": "gpt"}, "data": {"source": {"kind": "preferences", "path": "/private"}}},
        {"model": {"kind": "gpt"}, "data": {"source": {"kind": "mixture", "parts": [{"source": {"kind": "text", "path": "/private"}}]}}},
        {"model": {"kind": "gpt"}, "data": {"source": {"kind": "builtin", "name": "zen"}, "tokenizer": "/private"}},
        {"model": {"kind": "huggingface", "pretrained": "/private"}, "data": {"source": {"kind": "builtin", "name": "zen"}}},
        {
            "model": {"kind": "huggingface", "pretrained": "gpt2", "weights": "/private"},
            "data": {"source": {"kind": "builtin", "name": "zen"}},
        },
        text_model(retrieval={"enabled": True, "passages": "/private"}) | {"data": {"source": {"kind": "builtin", "name": "zen"}}},
        text_model(retrieval={"enabled": True, "index": "/private"}) | {"data": {"source": {"kind": "builtin", "name": "zen"}}},
        {"data": {"source": {"kind": "mnist", "path": "/private"}}},
    ],
)
def test_every_setting_that_is_read_as_a_path_is_checked(start: Path, settings: dict[str, Any]) -> None:
    with pytest.raises(ShoalError, match=r"is /private, .* add --data /private"):
        received(**settings)
    assert received(Permissions.of(["/private"]), **settings)


def test_built_in_data_and_hub_names_need_no_permission(start: Path) -> None:
    text = {"model": {"kind": "gpt"}}
    assert received().data.source is not None
    assert received(data={"source": {"kind": "mnist"}}).data.source is not None
    assert received(**text, data={"source": {"kind": "huggingface", "name": "owner/name"}, "tokenizer": "gpt2"}).data.source is not None


def test_a_tokenizer_that_the_coordinator_sends_is_not_read_here(start: Path) -> None:
    text = text_of(model={"kind": "gpt"}, data={"source": {"kind": "builtin", "name": "zen"}, "tokenizer": "/theirs"})
    assert read_received(text, (), NOTHING, Sent(tokenizer=True)).run.data.tokenizer == "/theirs"


def test_images_that_the_coordinator_sends_need_none_here(start: Path) -> None:
    source = read_received(text_of(data=images("/home/teacher/faces")), (), NOTHING, Sent(images=True)).run.data.source
    assert source is not None
    assert not Path(source.path).exists()  # type: ignore[attr-defined]


# --- what belongs to this machine ------------------------------------------------------------------------


def test_places_to_write_to_connect_to_and_to_start_are_this_machines_own(start: Path) -> None:
    run = received(
        output_dir="/theirs",
        transport={"kind": "zmq", "host": "203.0.113.9", "port": 1},
        launch={"kind": "ssh", "ssh": {"options": ["-oProxyCommand=touch /tmp/x"]}},
        cluster={"num_workers": 1, "workers": ["../../x"]},
        coordinator={"metrics_port": 9, "metrics_host": "0.0.0.0", "state_path": "/theirs", "checkpoint_path": "/theirs"},
        logging={"sinks": ["wandb"], "directory": "/theirs", "project": "theirs"},
        hub={"enabled": True, "repo_id": "eve/stolen", "token": "theirs"},
        checkpoint={"resume_from": "/theirs"},
    )
    empty = Run()
    assert (run.output_dir, run.transport, run.launch, run.hub) == (empty.output_dir, empty.transport, empty.launch, empty.hub)
    assert (run.logging.sinks, run.logging.directory, run.logging.project) == ((), None, None)
    assert (run.coordinator.metrics_port, run.coordinator.state_path, run.coordinator.checkpoint_path) == (None, None, None)
    assert (run.cluster.workers, run.cluster.hosts, run.checkpoint.resume_from) == ((), {}, None)


def test_a_reward_that_is_built_on_this_machine_contacts_and_reads_nothing(start: Path) -> None:
    judge = {"kind": "judge", "model": "/private", "address": "http://169.254.169.254/v1"}
    source = {"kind": "builtin", "name": "zen"}
    feedback = {"reward": judge, "prompts": "/private"}
    made = received(model={"kind": "gpt"}, task="ppo", strategy={"kind": "rollouts"}, data={"source": source}, rlhf=feedback)
    assert made.rlhf is not None
    assert (made.rlhf.reward.kind, made.rlhf.prompts) == ("sentiment", None)


def test_a_base_that_is_not_on_this_machine_is_not_among_what_is_read(start: Path) -> None:
    run = received(rlhf={"policy": "base"}, task={"kind": "ppo"}, model={"kind": "gpt"}, strategy={"kind": "rollouts"})
    assert local_paths(run) == []
    (start / "base").mkdir()
    assert local_paths(run) == ["base"]


def test_no_more_processes_than_cores_are_started_for_a_coordinator() -> None:
    many = usable_cores() + 22
    with pytest.raises(ShoalError, match=rf"devices_per_node is {many}, .* add --set launch\.devices_per_node={many}"):
        received(engine={"kind": "ddp"}, launch={"devices_per_node": many})
    run = received(NOTHING, f"launch.devices_per_node={many}", engine={"kind": "ddp"}, launch={"devices_per_node": many})
    assert run.launch.devices_per_node == many, "the user of this machine said so"
    assert received(data={"loader": {"num_workers": 5000}}).data.loader.num_workers == usable_cores()
    assert received(data={"loader": {"num_workers": 0}}).data.loader.num_workers == 0


def test_a_launcher_allows_what_its_own_file_names(start: Path) -> None:
    made = resolve_data(
        {
            "model": {"kind": "gpt"},
            "data": {"source": {"kind": "text", "path": "/private"}, "tokenizer": "gpt2"},
            "output_dir": "/elsewhere",
        },
        name="test",
        dialect="shoal",
        environ={},
    ).run
    assert arguments_for(made)[1::2] == ["/elsewhere", "/private", "gpt2", "hub:gpt2"]
    limited = read_received(settings_text(made), (), permissions_for(made)).run
    assert (limited.output_dir, limited.data) == (made.output_dir, made.data)


# --- texts that leave this machine -----------------------------------------------------------------------


def test_a_reason_contains_nothing_that_only_this_machine_knows(start: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "wJalrXUtnFEMI")
    monkeypatch.setenv("HTTPS_PROXY", "http://zelda:correct-horse@proxy.internal:8080")
    redact = Redactor("data: {source: {path: /sent/by/them}}")
    for text in (
        "there is nothing at /home/zelda/data/private.txt",
        "no file ../private.txt here",
        "cannot read ~/private.txt",
        "C:\\Users\\zelda\\private.txt is missing",
        "a link to file:///srv/private.txt",
        "key wJalrXUtnFEMI is wrong",
        "proxy correct-horse refuses",
        f"cannot open {start.parent}/home",
        "there is nothing at data (did you mean private.txt?)",
    ):
        said = redact(text)
        assert not any(secret in said for secret in ("private", "zelda", "wJalrXUtnFEMI", "correct-horse", str(start.parent))), said
    assert redact("there is nothing at /sent/by/them") == "there is nothing at /sent/by/them"
    assert redact("gradients were not finite") == "gradients were not finite"
