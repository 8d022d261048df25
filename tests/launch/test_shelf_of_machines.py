"""smolcluster's files: where the server listens, and where its figures go."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from shoal.config import derived_values as derive
from shoal.config.dialects import smolcluster
from shoal.config.load import ConfigFile, LoadedConfig, Override, resolve
from shoal.errors import ShoalError
from shoal.launch.start import start_run
from shoal.launch.start_mode import StartOptions, plan_start
from shoal.transports.addresses import free_port

HERE = {"data.source.kind": "builtin", "data.source.name": "digits", "model.input_dim": "64", "logging.sinks": "[]"}
CLUSTER = """
host_ip: {{mini1: "{server}", pi5: "{server}", win: "127.0.0.3"}}
port: {{mini1: {main}, pi5: {other}, win: {main}}}
num_workers: 2
workers: [pi5, win]
server: mini1
worker_update_interval: 10
"""


def loader(*files: str) -> LoadedConfig:
    return resolve([ConfigFile(file) for file in files], environ={})


def load_with(path: Path) -> object:
    def load(more: Sequence[Override]) -> LoadedConfig:
        own = [Override(name, value, f"--set {name}={value}") for name, value in HERE.items()]
        return resolve([ConfigFile(str(path)), ConfigFile("smolcluster/nn_config")], [*own, *more], environ={})

    return load


def test_the_server_listens_where_the_hosts_are_told_to_reach_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    main, other = free_port("127.0.0.2"), free_port("127.0.0.2")
    (tmp_path / "cluster.yaml").write_text(CLUSTER.format(server="127.0.0.2", main=main, other=other))
    with start_run(plan_start(load_with(tmp_path / "cluster.yaml"), StartOptions(invite=True)), []) as made:  # type: ignore[arg-type]
        try:
            listening = set(made.loop.server.addresses)  # type: ignore[union-attr]
        finally:
            made.loop.server.close()  # type: ignore[union-attr]
    assert made.invitation is not None
    assert made.invitation.address == f"tcp://127.0.0.2:{main}", "its own entry comes first"
    assert listening == {f"tcp://{host}:{port}" for host in ("127.0.0.2", "127.0.0.3") for port in (main, other)}


def test_a_server_that_is_started_on_another_machine_says_so_in_the_file_s_words(tmp_path: Path) -> None:
    (tmp_path / "cluster.yaml").write_text(CLUSTER.format(server="192.0.2.7", main=7001, other=7002))
    with (
        pytest.raises(ShoalError, match=r"`host_ip\.mini1` says .* 192\.0\.2\.7, which is no address of this machine"),
        start_run(plan_start(load_with(tmp_path / "cluster.yaml"), StartOptions(invite=True)), []),  # type: ignore[arg-type]
    ):
        pass


@pytest.mark.parametrize("file", ["smolcluster/nn_config", "smolcluster/gpt_config"])
def test_a_project_or_gradient_norms_go_to_wandb_where_it_is_installed(file: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(smolcluster, "find_spec", lambda name: object())
    assert [sink.kind for sink in loader(file).run.logging.sinks] == ["wandb"]
    for module in (smolcluster, derive):
        monkeypatch.setattr(module, "find_spec", lambda name: None)
    loaded = loader(file)
    (told,) = [problem for problem in loaded.problems if problem.code == "wandb"]
    assert loaded.run.logging.sinks == ()
    assert "which is not installed" in told.message
    assert told.path in ("track_gradients", "logging.project_name")


def test_a_file_that_names_no_schedule_has_none() -> None:
    assert loader("smolcluster/nn_config").run.training.schedule.kind == "constant"
    gpt = loader("smolcluster/gpt_config").run.training.schedule
    assert (gpt.kind, gpt.warmup_steps, gpt.end_learning_rate) == ("cosine", 100, 6e-5)
