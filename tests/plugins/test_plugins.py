"""Parts of other people's: chosen, checked, explained and trained with like ours; known by name and digest, and never sent."""

from __future__ import annotations

import ast
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

import pytest

import shoal.plugins
from shoal.cli.main import main
from shoal.config import plugins
from shoal.config.load import ConfigFile, LoadedConfig, resolve, resolve_data
from shoal.config.parts import FAMILIES
from shoal.config.reference import json_schema, settings_page
from shoal.config.schema.task import Gan
from shoal.data import Data, Samples, SampleStream, ShardFeed, fingerprint
from shoal.data.load_data import load as load_data
from shoal.errors import ShoalError
from shoal.runs.rlhf.rewards.interface import Answer
from tests.support.processes import HANG_S, Processes, processes_in

pytestmark = pytest.mark.whole

HERE = Path(__file__).parent
EXAMPLES = HERE.parents[1] / "examples" / "plugins"
MY_PARTS = (HERE / "my_parts.py").read_text(encoding="utf-8")
CONFIG = """\
model: {kind: waves, width: 24}
training: {batch_size: 16, epochs: 4, optimizer: {learning_rate: 0.01}}
strategy: {kind: patient, deadline_s: 30}
updates:
  codec: {kind: rounded, places: 4}
  aggregation: {kind: drifting, pace: 0.8}
transport: {port: 0}
coordinator: {heartbeat_interval_s: 1.0}
"""
RULE = """\
from typing import Literal
from shoal.plugins import Aggregation, builds


class Own(Aggregation):
    '''A rule.'''

    kind: Literal["{kind}"] = "{kind}"


@builds(Own)
def own(rule, contributions):
    return contributions.rows.mean(0)
"""


@pytest.fixture(autouse=True)
def nothing_stays() -> Iterator[None]:
    """A test's plugins end with it."""
    yield
    for plugin in list(plugins.LOADED.values()):
        plugins.unload(plugin)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "my_parts.py").write_text(MY_PARTS, encoding="utf-8")
    (tmp_path / "config.yaml").write_text(CONFIG, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def processes(folder: Path) -> Iterator[Processes]:
    with processes_in(folder) as made:
        yield made


def loaded_with(text: str, *named: str | Path) -> LoadedConfig:
    plugins.load(*named)
    Path("other.yaml").write_text(text, encoding="utf-8")
    return resolve([ConfigFile("other.yaml")], dialect="shoal", environ={})


def codes(loaded: LoadedConfig) -> list[str]:
    return [problem.code for problem in loaded.problems]


# --- real processes ---------------------------------------------------------------------------------


def test_a_run_learns_with_the_parts_of_a_plugin_and_goes_on_with_no_other_version(
    processes: Processes, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, output = processes.run("train", "config.yaml", "--workers", "2", "--run-dir", "run", "--plugin", "my_parts.py")
    assert code == 0, output
    summary = json.loads((folder / "run" / "summary.json").read_text())
    assert summary["metrics"]["eval"]["accuracy"] > 0.8
    assert json.loads((folder / "run" / "provenance.json").read_text())["settings"]["task.kind"]["value"] == "margin"
    (digest,) = json.loads((folder / "run" / "plugins.json").read_text())["plugins"].values()
    for command in (["eval", "run"], ["export", "run", "there"], ["train", "--resume", "--run-dir", "run"]):
        assert main(command) == 2
        error = capsys.readouterr().err
        assert f"needs the plugin my_parts.py (SHA-256 {digest[:16]}…)" in error
        assert "add --plugin my_parts.py" in error
    assert main(["eval", "run", "--plugin", "my_parts.py"]) == 0
    assert main(["audit", "run", "--plugin", "my_parts.py"]) == 0
    (folder / "my_parts.py").write_text(MY_PARTS + "\n# another version\n", encoding="utf-8")
    assert main(["train", "config.yaml", "--workers", "2", "--resume", "--run-dir", "run", "--plugin", "my_parts.py"]) == 2
    error = capsys.readouterr().err
    assert f"needs the plugin my_parts.py with SHA-256 {digest[:16]}…" in error
    assert "my_parts.py has" in error


def test_a_worker_without_the_plugin_or_with_another_version_is_refused(processes: Processes, folder: Path) -> None:
    coordinator, command = processes.coordinate("--plugin", "my_parts.py")
    assert command[-2:] == ["--plugin", "my_parts.py"], "the printed line says what to name"
    code, output = processes.run(*command[:-2])
    assert (code, "this run needs the plugin my_parts.py (SHA-256" in output, "add --plugin my_parts.py" in output) == (2, True, True), (
        output
    )
    (folder / "other").mkdir()
    (folder / "other" / "my_parts.py").write_text(MY_PARTS.replace("0.5", "0.6"), encoding="utf-8")
    code, output = processes.run(*command[:-1], "other/my_parts.py")
    assert (code, "other/my_parts.py has" in output) == (2, True), output
    code, output = processes.run(*command)
    assert code == 0, output
    assert coordinator.wait(HANG_S) == 0


def test_every_example_of_the_documentation_runs_as_a_plugin(processes: Processes, folder: Path) -> None:
    named = [word for file in sorted(EXAMPLES.glob("*.py")) for word in ("--plugin", str(file))]
    code, output = processes.run("train", str(EXAMPLES / "config.yaml"), *named, "--workers", "2", "--run-dir", "run")
    assert code == 0, output
    records = [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()]
    assert max(record.get("accuracy", 0.0) for record in records) > 0.9  # signs alone, so it is not steady
    assert len(json.loads((folder / "run" / "plugins.json").read_text())["plugins"]) == len(FAMILIES) - 1, "all but the reward"
    assert (folder / "losses.csv").read_text().startswith("split,step,loss\ntrain,")
    assert "contribute" in (folder / "requests.txt").read_text()


def test_a_reward_of_a_plugin_scores_answers(folder: Path) -> None:
    plugins.load(str(EXAMPLES / "brief_reward.py"))
    data = {"model": {"kind": "gpt"}, "rlhf": {"reward": {"kind": "brief", "longest": 4}}}
    run = resolve_data(data, name="test", dialect="shoal").run
    assert run.rlhf is not None
    score = run.rlhf.reward.builder()(run.rlhf.reward, run)
    assert score([Answer("", "two words", None), Answer("", "", None)]) == [0.5, 1.0]


DUCK_SOURCE = """\
from typing import Literal
import torch
from shoal.plugins import Data, DataInfo, DataSource, builds


class Numbers(DataSource):
    '''Numbered images.'''

    kind: Literal["numbers"] = "numbers"
    gives = "images"
    stream: bool = False
    '''Whether they are a stream.'''


class NumberSamples:
    def __len__(self):
        return 40

    def batch(self, indices):
        labels = torch.as_tensor(indices)
        return {{"image": labels.float().view(-1, 1, 1, 1) / 40, "label": labels % 2}}
{order}

class NumberStream:
    def read(self, *, shard, seed, epoch, state=None):
        return NumberReader(state["next"] if state else shard[0], shard[1])

    def collate(self, samples):
        return NumberSamples().batch(samples)


class NumberReader:
    def __init__(self, first, step):
        self.next, self.step = first, step

    def __iter__(self):
        return self

    def __next__(self):
        if self.next >= 40:
            raise StopIteration
        self.next += self.step
        return self.next - self.step

    def state_dict(self):
        return {{"next": self.next}}


@builds(Numbers)
def load(source, run, request):
    return Data(NumberStream() if source.stream else NumberSamples(), NumberSamples(), DataInfo("image", "numbers", (1, 1, 1), 2))
"""
BACKWARDS = """
    def order(self, seed, epoch):
        return torch.arange(40).flip(0)
"""


def data_of_plugin(folder: Path, order: str = "", settings: str = "") -> Data:
    (folder / "numbers.py").write_text(DUCK_SOURCE.format(order=order), encoding="utf-8")
    return load_data(loaded_with(f"data: {{source: {{kind: numbers{settings}}}}}\nmodel: {{kind: mlp}}\n", "numbers.py").run)


@pytest.mark.parametrize("order", ["", BACKWARDS])
def test_a_plugins_samples_need_not_extend_samples(folder: Path, order: str) -> None:
    data = data_of_plugin(folder, order)
    assert isinstance(data.train, Samples)
    assert isinstance(data.eval, Samples)
    numbers = [round(40 * float(value)) for batch in islice(feed_of(data), 4) for value in batch["image"].flatten()]
    assert sorted(numbers) == list(range(40))
    assert (numbers == list(range(39, -1, -1))) == bool(order), "its own order, or else a shuffled one"
    assert fingerprint(data) == fingerprint(data_of_plugin(folder, order))


def test_a_plugins_stream_need_not_extend_sample_stream(folder: Path) -> None:
    data = data_of_plugin(folder, settings=", stream: true")
    assert isinstance(data.train, SampleStream)
    feed = feed_of(data)
    next(feed)
    resumed = feed_of(data)
    resumed.load_state_dict(feed.state_dict())
    assert next(resumed)["image"].equal(next(feed)["image"])


def feed_of(data: Data) -> ShardFeed:
    return ShardFeed(data.train, batch_size=10, seed=0)


def test_a_plugins_data_that_are_no_samples_are_refused(folder: Path) -> None:
    (folder / "wrong.py").write_text(DUCK_SOURCE.format(order="").replace("def batch", "def rows"), encoding="utf-8")
    run = loaded_with("data: {source: {kind: numbers}}\nmodel: {kind: mlp}\n", "wrong.py").run
    with pytest.raises(ShoalError, match=r"`eval` of the data is of type NumberSamples, and must extend Samples"):
        load_data(run)


def test_the_documentation_shows_the_examples_as_they_are() -> None:
    page = (HERE.parents[1] / "docs" / "extending.md").read_text(encoding="utf-8")
    shown = dict(re.findall(r"<!-- (examples/\S+) -->\n```python\n(.*?)```\n", page, re.DOTALL))
    assert shown == {f"examples/plugins/{file.name}": file.read_text(encoding="utf-8") for file in EXAMPLES.glob("*.py")}, "run `make docs`"
    assert len(shown) == len(FAMILIES), "one example for each kind of part"


def shoal_imports(text: str) -> set[str]:
    """The modules of Shoal that Python text imports."""
    imported: set[str] = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            imported |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            imported.add(node.module or "")
    return {name for name in imported if name.split(".")[0] == "shoal"}


def test_plugins_import_nothing_of_shoal_but_shoal_plugins() -> None:
    for file in [*EXAMPLES.glob("*.py"), HERE / "my_parts.py"]:
        assert shoal_imports(file.read_text(encoding="utf-8")) == {"shoal.plugins"}, file
    page = (HERE.parents[1] / "docs" / "extending.md").read_text(encoding="utf-8")
    assert set(re.findall(r"(?:from|import) (shoal(?:\.\w+)*)", page)) == {"shoal.plugins"}


def test_every_name_for_plugins_is_there_and_has_a_type_for_type_checkers() -> None:
    tree = ast.parse(Path(shoal.plugins.__file__).read_text(encoding="utf-8"))
    (checked,) = (node for node in tree.body if isinstance(node, ast.If))
    imports = [node for node in checked.body if isinstance(node, ast.ImportFrom)]
    typed = {alias.asname or alias.name: f"{node.module}.{alias.name}" for node in imports for alias in node.names}
    assert typed == shoal.plugins._IMPORTED_ON_USE
    assert all(hasattr(shoal.plugins, name) for name in shoal.plugins.__all__)


def test_importing_shoal_plugins_imports_neither_torch_nor_numpy() -> None:
    code = "import sys, shoal.plugins; sys.exit(bool({'torch', 'numpy'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=HANG_S).returncode == 0


# --- settings -----------------------------------------------------------------------------------------


def test_a_misspelt_setting_or_kind_of_a_plugin_is_told_as_well_as_ours(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    settings = ("--set", "updates.codec.place=2", "--set", "updates.aggregation.kind=drifitng", "--set", "model.width=0")
    assert main(["config", "check", "config.yaml", "--plugin", "my_parts.py", *settings]) == 2
    error = capsys.readouterr().err
    assert "did you mean `updates.codec.places`?" in error
    assert "did you mean `drifting`?" in error
    assert "expected a whole number at least 1" in error


def test_an_unknown_kind_says_how_a_plugin_is_named(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config", "check", "config.yaml"]) == 2
    assert "where a plugin has it, name the plugin: --plugin FILE" in capsys.readouterr().err


def test_a_plugins_setting_is_explained_and_shown_with_its_origin(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config", "explain", "updates.codec.places", "config.yaml", "--plugin", "my_parts.py"]) == 0
    told = capsys.readouterr().out
    assert "config.yaml:5:34" in told
    assert "meaning   Decimal places that are kept." in told
    assert "default 3" in told
    assert main(["config", "show", "--origin", "config.yaml", "--plugin", "my_parts.py"]) == 0
    shown = capsys.readouterr().out
    assert "  kind: margin " in shown
    assert "what a model of kind waves is for" in shown


def test_a_plugins_settings_are_in_the_schema_and_the_reference(folder: Path) -> None:
    plugins.load("my_parts.py")
    definition = json_schema()["$defs"]["plugin_my_parts.Rounded"]
    assert definition["description"] == "Decimal places, as whole numbers of two bytes."
    assert definition["properties"]["places"]["default"] == 3
    assert "## updates.codec, kind `rounded`" in settings_page()
    assert "## task, kind `margin`" in settings_page()


def test_a_task_is_a_word_or_a_mapping_with_settings(folder: Path) -> None:
    assert loaded_with("task: margin\n", "my_parts.py").run.chosen_task.kind == "margin"
    assert loaded_with("task: {kind: margin, margin: 0.25}\n").run.task == FAMILIES["task"].kinds["margin"](margin=0.25)
    assert loaded_with("task: gan\nmodel: {kind: dcgan}\n").run.task == Gan()
    assert codes(loaded_with("task: margin\nmodel: {kind: gpt}\n")) == ["task"]
    assert codes(loaded_with("task: {margin: 0.25}\n")) == ["missing-key"]
    assert codes(loaded_with("task: margn\n")) == ["unknown-choice"]


# --- importing ----------------------------------------------------------------------------------------


def test_two_parts_of_one_name_are_refused_and_both_places_told(folder: Path) -> None:
    (folder / "mine.py").write_text(RULE.format(kind="median"))
    with pytest.raises(ShoalError, match=r"the aggregation rule `median` is at .*schema/updates\.py:\d+ and at .*mine\.py:5; rename one"):
        plugins.load("mine.py")
    (folder / "first.py").write_text(RULE.format(kind="own"))
    (folder / "second.py").write_text(RULE.format(kind="own"))
    with pytest.raises(ShoalError, match=r"first\.py:5 and at .*second\.py:5"):
        plugins.load("first.py", "second.py")
    assert list(plugins.LOADED) == ["first.py"]


def test_two_files_of_one_name_are_refused(folder: Path) -> None:
    (folder / "other").mkdir()
    (folder / "other" / "my_parts.py").write_text(RULE.format(kind="own"))
    with pytest.raises(ShoalError, match=r"two plugins are called my_parts\.py: .*my_parts\.py and .*other/my_parts\.py"):
        plugins.load("my_parts.py", "other/my_parts.py")


def test_a_plugin_that_fails_leaves_nothing_behind_and_tells_its_line(folder: Path) -> None:
    before = {family: list(kinds.kinds) for family, kinds in FAMILIES.items()}
    (folder / "broken.py").write_text(RULE.format(kind="own") + "\n1 / 0\n")
    with pytest.raises(ShoalError, match=r"broken\.py cannot be imported: ZeroDivisionError: division by zero \(.*broken\.py:15\)"):
        plugins.load("broken.py")
    assert {family: list(kinds.kinds) for family, kinds in FAMILIES.items()} == before
    assert not plugins.LOADED


def test_a_part_that_nothing_makes_is_told_when_the_plugin_is_loaded(folder: Path) -> None:
    (folder / "half.py").write_text(RULE.format(kind="own").partition("@builds")[0])
    with pytest.raises(ShoalError, match=r"nothing makes the aggregation rule `own` \(.*half\.py:5\): decorate .* with @builds\(Own\)"):
        plugins.load("half.py")
    assert not plugins.LOADED


def test_what_is_not_there_is_told(folder: Path) -> None:
    with pytest.raises(ShoalError, match=r"the plugin nobody\.py cannot be read: No such file"):
        plugins.load("nobody.py")
    (folder / "nearby.py").write_text("")
    with pytest.raises(ShoalError, match=r"there is no plugin `nearby`: .*is it the file nearby\.py\?"):
        plugins.load("nearby")


def test_a_file_that_was_changed_takes_the_place_of_what_it_was(folder: Path) -> None:
    (folder / "mine.py").write_text(RULE.format(kind="one"))
    first = plugins.load("mine.py")
    assert plugins.load("mine.py") == first
    (folder / "mine.py").write_text(RULE.format(kind="two"))
    assert plugins.load("mine.py")[0].digest != first[0].digest
    assert "two" in FAMILIES["aggregation rule"].kinds
    assert "one" not in FAMILIES["aggregation rule"].kinds


def test_an_installed_plugin_is_imported_only_when_it_is_named(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = folder / "own_rules"
    package.mkdir()
    (package / "__init__.py").write_text("from own_rules import one\n")
    (package / "one.py").write_text(RULE.format(kind="own"))
    installed = folder / "own_rules-1.0.dist-info"
    installed.mkdir()
    (installed / "METADATA").write_text("Metadata-Version: 2.1\nName: own-rules\nVersion: 1.0\n")
    (installed / "entry_points.txt").write_text("[shoal.plugins]\nown = own_rules\n")
    monkeypatch.syspath_prepend(str(folder))
    assert codes(loaded_with("updates: {aggregation: {kind: own}}\nstrategy: {kind: syncps}\n")) == ["unknown-choice"]
    assert "own_rules" not in sys.modules
    loaded = loaded_with("updates: {aggregation: {kind: own}}\nstrategy: {kind: syncps}\n", "own")
    before = plugins.needed_by(loaded.run)
    assert list(before) == ["own"]
    (package / "one.py").write_text(RULE.format(kind="own") + "# changed\n")
    plugins.unload(plugins.LOADED["own"])
    (changed,) = plugins.load("own")
    assert changed.digest != before["own"], "the digest is of all files of the package"
    (package / "compiled.so").write_bytes(b"machine code")
    plugins.unload(plugins.LOADED["own"])
    assert plugins.load("own")[0].digest != changed.digest, "also of those that are compiled"


def test_a_plugin_that_changes_while_it_is_loaded_is_refused(folder: Path) -> None:
    """What was run would not be what the run's record says."""
    (folder / "mine.py").write_text(RULE.format(kind="one") + "from pathlib import Path\nPath('mine.py').write_text('')\n")
    with pytest.raises(ShoalError, match="was changed while it was loaded"):
        plugins.load("mine.py")
    assert "one" not in FAMILIES["aggregation rule"].kinds


# --- who has what ---------------------------------------------------------------------------------------


def test_a_run_without_plugins_needs_none(folder: Path) -> None:
    plugins.load("my_parts.py")
    assert plugins.needed_by(loaded_with("model: {kind: mlp}\n").run) == {}


def test_a_coordinators_words_about_plugins_are_not_trusted() -> None:
    for needed in ({"x; rm -rf .": "0" * 64}, {"mine.py": "not a digest"}):
        with pytest.raises(ShoalError, match="has an invalid plugin entry"):
            plugins.require_same(needed, "this run")


def test_a_part_of_the_program_itself_is_no_part_for_other_processes(folder: Path) -> None:
    spec = plugins.load("my_parts.py")[0]
    plugins.LOADED.clear()  # as if the program had declared them itself
    try:
        with pytest.raises(ShoalError, match=r"the (task|model) of .*my_parts\.py:\d+ is in no plugin"):
            plugins.needed_by(loaded_with("model: {kind: waves}\nstrategy: {kind: syncps}\n").run)
        assert plugins.needed_by(loaded_with("model: {kind: waves}\n").run) == {}, "a run within the program"
    finally:
        plugins.unload(spec)
