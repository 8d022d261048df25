"""The model card: what a model is, how it was trained, how good it is, how to load it. On the hub, or in the folder of a class's run."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from shoal.config import Run
from shoal.config.fields import as_data
from shoal.config.schema.training import TorchOptimizer
from shoal.config.show import resolved_text
from shoal.engines import Engine
from shoal.engines.pipeline.split import numbers_used
from shoal.runs.folder.run_reader import DATA, is_figure
from shoal.runs.monitoring.recorder import Recorder, Reporter

_NOT_IN_CARD = ("hub", "transport")
"""Settings that name machines, and may hold secrets."""


class CardFacts(NamedTuple):
    """What the card says about the run."""

    run: Run
    step: int
    step_name: str
    total_steps: int | None
    """None: the data decides when the run ends."""
    completed: bool
    samples: int
    wall_s: float
    size: int
    active: int
    """The parameters that a token uses."""
    data: str
    optimizers: Mapping[str, TorchOptimizer]
    """By network: the optimizer that steps it."""
    folder: str = ""
    """Where the model lies on this machine, for a card that is not on the hub."""


def facts_of(recorder: Recorder, folder: str = "") -> CardFacts:
    """The facts of a run at its present step."""
    data = (DATA.read(recorder.directory.path / "data.json") or {"name": ""})["name"]
    completed, size = recorder.completed >= recorder.engine.total_steps, recorder.engine.size
    steps = (recorder.step, recorder.step_name, recorder.known_steps, completed)
    active = _active(recorder.engine)
    return CardFacts(recorder.run, *steps, recorder.samples, recorder.wall_s, size, active, data, recorder.engine.chosen, folder)


def write_card(facts: CardFacts, records: list[dict[str, Any]], sample: Path | None, config: str) -> str:
    """The text of README.md."""
    learned = [_training(facts), _metrics(records, facts.step_name), _loading(facts)]
    parts = [_header(facts.run), _introduction(facts), _sample(sample), *learned]
    settings = f"## Settings\n\n<details>\n<summary>config.yaml</summary>\n\n````yaml\n{config}````\n\n</details>"
    return "\n\n".join([part for part in parts if part] + [settings]) + "\n"


def _header(run: Run) -> str:
    lines = ["---", "library_name: shoal", "tags:", "- shoal", f"- {run.model.kind}"]
    pipeline = run.chosen_task.pipeline
    lines += [f"pipeline_tag: {pipeline}"] if pipeline else []
    return "\n".join([*lines, "---"])


def _introduction(facts: CardFacts) -> str:
    run = facts.run
    base = getattr(run.model, "pretrained", None)
    kind = f"{base}, fine-tuned" if base else f"a model of kind `{run.model.kind}`"
    does = f" that {run.chosen_task.does}" if run.chosen_task.does else ""
    state = "at the end of its training" if facts.completed else "while it is still being trained"
    title = run.name or run.hub.repo_id.partition("/")[2] or Path(facts.folder).name
    return f"# {title}\n\nThis is {kind}{does}, with {_parameters(facts)}, trained with Shoal; here {state}."


def _parameters(facts: CardFacts) -> str:
    return f"{facts.size:,} parameters" + (f", of which a token uses {facts.active:,}" if facts.active < facts.size else "")


def _active(engine: Engine) -> int:
    """The trained parameters that a token uses: of a mixture's experts those that it goes to. All of them where a process has a part."""
    counts = [
        (weight.numel(), used) for player in engine.task.players.values() for weight, used in numbers_used(player) if weight.requires_grad
    ]
    whole = sum(numel for numel, _ in counts) == engine.size
    return round(sum(used for _, used in counts)) if whole else engine.size


def _sample(sample: Path | None) -> str:
    if sample is None:
        return ""
    if sample.suffix == ".png":
        return f"![Images it drew](samples/{sample.name})"
    written = sample.read_text(encoding="utf-8", errors="replace")
    return "What it writes:\n\n" + "\n".join(f"    {line}" for line in written.splitlines())


def _training(facts: CardFacts) -> str:
    run = facts.run
    of_all = f" of {facts.total_steps:,}" if facts.total_steps else ""
    rows = {
        "data": facts.data or "-",
        "strategy": f"`{run.strategy.kind}`, engine `{run.engine.kind}`",
        f"{facts.step_name}s": f"{facts.step:,}{of_all}",
        "samples seen": f"{facts.samples:,}",
        "batch size": run.training.batch_size,
        **_optimizers(facts),
        "seed": run.seed,
        "time": f"{facts.wall_s:,.1f} s",
    }
    return "## How it was trained\n\n| | |\n|---|---|\n" + "\n".join(f"| {name} | {value} |" for name, value in rows.items())


def _optimizers(facts: CardFacts) -> dict[str, str]:
    """A row for the optimizer, and one for that of each network whose optimizer differs."""
    texts = {name: _optimizer(one) for name, one in facts.optimizers.items()}
    if len(set(texts.values())) == 1:
        return {"optimizer": next(iter(texts.values()))}
    return {f"optimizer of the {name}": text for name, text in texts.items()}


def _optimizer(settings: TorchOptimizer) -> str:
    """The name of an optimizer, and the settings that are not its defaults."""
    names = ("learning_rate", "weight_decay", "beta1", "beta2", "eps", "momentum")
    given = {name: getattr(settings, name) for name in names if getattr(settings, name) is not None} | dict(settings.kwargs)
    shown = [f"{name.replace('_', ' ')} {value:g}" if isinstance(value, float) else f"{name} {value}" for name, value in given.items()]
    return ", ".join([settings.name, *shown])


def _metrics(records: list[dict[str, Any]], step_name: str) -> str:
    newest = {record["split"]: record for record in records}
    columns = [(title, newest[split]) for split, title in (("train", "training"), ("eval", "held-out data")) if split in newest]
    names = [name for _, record in columns for name, value in record.items() if is_figure(name) and isinstance(value, (int, float))]
    if not names:
        return ""
    head = "| | " + " | ".join(f"{title} ({step_name} {record['step']:,})" for title, record in columns) + " |"
    rows = [f"| {name} | " + " | ".join(_figure(record.get(name)) for _, record in columns) + " |" for name in dict.fromkeys(names)]
    return "\n".join(["## Metrics", "", head, "|---" * (len(columns) + 1) + "|", *rows, "", "All of them are in `metrics.jsonl`."])


def _figure(value: object) -> str:
    return f"{value:.6g}" if isinstance(value, (int, float)) else "-"


def _loading(facts: CardFacts) -> str:
    run = facts.run
    repo = run.hub.repo_id
    name = facts.folder or repo.partition("/")[2]
    use = {"images": f"shoal generate {name} --grid grid.png", "text": f'shoal generate {name} --prompt "Once"', "": f"shoal eval {name}"}
    if facts.folder:
        return f"## How to use it\n\n```sh\n{use[run.chosen_task.shows]}\n```"
    command = f"hf download {repo} --local-dir {name}\n{use[run.chosen_task.shows]}"
    return f"""## How to load it

```sh
{command}
```

or its tensors alone, named `network.parameter`:

```python
from huggingface_hub import hf_hub_download
from safetensors.torch import load_file

tensors = load_file(hf_hub_download("{repo}", "model.safetensors"))
```"""


class LocalCard(Reporter):
    """Writes README.md when the run ends: what the model is, how it was trained, how good it is, and how to use it."""

    def start(self, recorder: Recorder) -> None:
        self.recorder = recorder

    def close(self, summary: dict[str, Any]) -> None:
        recorder, folder = self.recorder, self.recorder.directory.path
        settings = {name: value for name, value in as_data(recorder.run).items() if name not in _NOT_IN_CARD}
        sample = max((folder / "samples").glob("step-*"), key=lambda path: path.name, default=None)
        try:
            card = write_card(facts_of(recorder, str(folder)), recorder.directory.metrics(), sample, resolved_text(settings))
            (folder / "README.md").write_text(card, encoding="utf-8")
        except OSError as error:
            recorder.message(f"warning: there is no model card in {folder}: {error.strerror or error}")
