"""The README tells the truth: its commands run, its output is what they print."""

from __future__ import annotations

import importlib.util
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from shoal.cli.main import main
from tests.support.processes import HANG_S

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
TRAINING = (ROOT / "docs" / "training.md").read_text(encoding="utf-8")
CONFIGURING = (ROOT / "docs" / "configuring.md").read_text(encoding="utf-8")
ISLANDS = (ROOT / "docs" / "islands.md").read_text(encoding="utf-8")
PIPELINE = (ROOT / "docs" / "pipeline.md").read_text(encoding="utf-8")
MIXTURES = (ROOT / "docs" / "mixtures.md").read_text(encoding="utf-8")
WATCHING = (ROOT / "docs" / "watching.md").read_text(encoding="utf-8")
SHELF = (ROOT / "docs" / "shelf.md").read_text(encoding="utf-8")
RACK = (ROOT / "docs" / "rack.md").read_text(encoding="utf-8")
FEEDBACK = (ROOT / "docs" / "feedback.md").read_text(encoding="utf-8")
VOLUNTEERS = (ROOT / "docs" / "volunteers.md").read_text(encoding="utf-8")
OPERATIONS = (ROOT / "docs" / "operations.md").read_text(encoding="utf-8")
SERVING = (ROOT / "docs" / "serving.md").read_text(encoding="utf-8")
PYTHON = (ROOT / "docs" / "python.md").read_text(encoding="utf-8")
SLIPS = "dialect: shoal\nmodel:\n  kind: gtp\nstrategy:\n  kind: syncps\n  pull_evry_steps: 10\n"


def shell(command: str, folder: Path) -> str:
    environ = {**os.environ, "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}
    result = subprocess.run(
        ["sh", "-c", command], cwd=folder, env=environ, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=HANG_S
    )
    assert result.returncode in (0, 2), result.stdout
    return result.stdout


def blocks(language: str, page: str = README) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", page, re.DOTALL)


def test_the_shown_output_is_what_is_printed(tmp_path: Path) -> None:
    for file in (ROOT / "examples" / "layers").glob("*.yaml"):
        (tmp_path / file.name).write_text(file.read_text())
    (tmp_path / "slips.yaml").write_text(SLIPS)
    for block in blocks("console", CONFIGURING):
        for command, output in re.findall(r"^\$ (.*)\n((?:(?!\$ ).*\n)*)", block, re.MULTILINE):
            assert shell(command, tmp_path).strip() == output.strip()


def commands_in(block: str) -> list[str]:
    return [line for line in re.sub(r"\\\n *", "", block).splitlines() if line.startswith("shoal")]


SCRIPTS = [
    pytest.param(commands_in(block), id=f"{name} {number}")
    for name, page in (
        ("README", README),
        ("training", TRAINING),
        ("configuring", CONFIGURING),
        ("islands", ISLANDS),
        ("mixtures", MIXTURES),
        ("pipeline", PIPELINE),
        ("watching", WATCHING),
        ("shelf", SHELF),
        ("rack", RACK),
        ("feedback", FEEDBACK),
        ("volunteers", VOLUNTEERS),
        ("operations", OPERATIONS),
        ("serving", SERVING),
    )
    for number, block in enumerate(blocks("sh", page), 1)
    if commands_in(block) and "islands.yaml" not in block  # a Hugging Face model on islands: test_finetune_page.py runs it
]


def smaller(words: list[str]) -> list[str]:
    """What makes a run of the demonstration's GPT a matter of a second: the commands are the page's, the model is smaller."""
    config = Path("config.yaml")
    written = yaml.safe_load(config.read_text(encoding="utf-8")) if "config.yaml" in words and config.exists() else {}
    gpt = "demo-gpt" in words or written.get("model", {}).get("kind") == "gpt"
    begins = words[1] == "train" and "--resume" not in words
    settings = SMALLER if gpt else SHORTER if "controller" in written else ()
    return [word for setting in settings for word in ("--set", setting)] if begins else []


SHORTER = ("training.max_steps=4",)
"""For the first run of volunteers, which takes two minutes to learn."""
SMALLER = ("model.hidden_size=16", "model.num_layers=2", "model.num_heads=2", "data.max_eval_samples=32")


@pytest.mark.parametrize("commands", SCRIPTS)
def test_the_commands_run(commands: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """A block after the other in the text; each is run in a folder of its own, where the reader's `shoal init` has been. A plain command
    runs in this process, which has loaded torch already; what it starts are processes all the same."""
    monkeypatch.chdir(tmp_path)
    if not commands[0].startswith("shoal init"):
        main(["init"])
    for command in commands:
        words = shlex.split(command, comments=True)
        if {">", "||"} & set(words):
            output = shell(command, tmp_path)
        else:
            assert main([*words[1:], *smaller(words)]) in (0, 2), command
            output = "".join(capsys.readouterr())
        assert "error" not in output.split("\n")[0], (command, output)


def test_the_pages_show_commands() -> None:
    assert len(SCRIPTS) >= 7
    assert sum(len(script.values[0]) for script in SCRIPTS) >= 20


def test_the_examples_of_the_python_page_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(tmp_path)
    examples = blocks("python", PYTHON)
    assert len(examples) >= 5
    names: dict[str, object] = {"__name__": "__main__"}
    for example in examples:
        exec(compile(example, "docs/python.md", "exec"), names)
    printed = capsys.readouterr().out
    assert "interrupted 20 then completed 54" in printed
    assert (tmp_path / "trained" / "model.safetensors").exists()
    assert list((tmp_path / "watched" / "logs").glob("events.*"))


STARTING_POINTS = re.findall(r"^\| [^|]* \| `(shoal [^`]*)` \| [^|]* \|$", README, re.MULTILINE)
OF_A_PAGE = "shoal train finetune.yaml"
"""The row of a page that shows the file: test_finetune_page.py runs it."""


@pytest.mark.parametrize("command", [command for command in STARTING_POINTS if command != OF_A_PAGE])
def test_the_starting_points_work(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(shlex.split(command)[1:]) == 0
    if "init" in command:
        assert main(["config", "check"]) == 0
        assert "OK" in capsys.readouterr().out


TOP_PAGES = [ROOT / f"{name}.md" for name in ("README", "CONTRIBUTING", "CHANGELOG", "SECURITY")]
PAGES = [*TOP_PAGES, *sorted((ROOT / "docs").glob("*.md"))]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#]+)\)", re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)):
        assert "://" in target or (page.parent / target).exists(), target


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_no_line_outside_tables_is_longer_than_160_characters(page: Path) -> None:
    assert not [line for line in page.read_text(encoding="utf-8").splitlines() if len(line) > 160 and not line.startswith("|")]


def test_the_glossary_has_at_most_35_terms() -> None:
    rows = re.findall(r"^\| (?!term|---)", (ROOT / "docs" / "glossary.md").read_text(encoding="utf-8"), re.MULTILINE)
    assert 20 <= len(rows) <= 35


def test_the_site_has_all_pages_and_asks_nobody_for_anything(tmp_path: Path) -> None:
    spec = importlib.util.spec_from_file_location("site_of_docs", ROOT / "docs" / "site.py")
    assert spec is not None
    assert spec.loader is not None
    site = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(site)
    written = {path.name: path.read_text(encoding="utf-8") for path in site.build(tmp_path / "site")}
    assert {f"{page.stem}.html" for page in (ROOT / "docs").glob("*.md")} - written.keys() == {"README.html"}, "every page is in the index"
    for name, text in written.items():
        assert not re.search(r"<(script|link|img|iframe)[^>]*(src|href)=.http", text), name
        for target in re.findall(r'href="([a-z]+\.html)', text):
            assert target in written, (name, target)
