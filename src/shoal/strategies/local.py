"""Nobody else: one worker, one loop. Everything a run is made of is put together here."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from shoal import data, models, tasks
from shoal.config import Run
from shoal.config.fields import as_data
from shoal.config.layers import default_at
from shoal.config.load import File, Loaded, resolve
from shoal.config.text import data_of
from shoal.engines import SingleEngine
from shoal.engines.single import choose_device
from shoal.errors import ShoalError
from shoal.tasks.images import grid, save_png
from shoal.worker import Loop, Reporter, RunDirectory
from shoal.worker.checkpoint import Checkpoint, Checkpoints, find
from shoal.worker.run_directory import same_settings

Progress = Callable[[str, int, int | None], None]

# Settings that ask for a part which does not exist yet. None of them may be ignored.
_UNBUILT = {
    "cluster.": "training on several machines",
    "coordinator.": "training on several machines",
    "transport.": "training on several machines",
    "updates.": "what happens to updates between workers",
    "scheduler.": "scheduling",
    "simulation.": "simulation",
    "serving.num_nodes": "serving",
    "serving.api_port": "serving",
    "serving.page_port": "serving",
    "serving.request_timeout_s": "serving",
    "rlhf": "reinforcement learning from feedback",
    "launch.": "engines of several processes",
}


def refuse_unbuilt(loaded: Loaded) -> None:
    """A configuration that asks for a part that is not built yet is refused, by name."""
    run = loaded.run
    if run.model.kind == "moe":
        raise ShoalError("models of kind moe are not built yet")
    if run.strategy.kind != "local":
        raise ShoalError(f"the strategy {run.strategy.kind} is not built yet; local is")
    if run.engine.kind != "single":
        raise ShoalError(f"the engine {run.engine.kind} is not built yet; single is")
    if run.data.source is not None and run.data.source.kind == "preferences":
        raise ShoalError("data.source: learning from preferences is not built yet")
    if run.hub.enabled:
        raise ShoalError("uploads to the hub are not built yet; set hub.enabled to false")
    for path, history in loaded.settings.history.items():
        node = history[-1].node
        part = next((name for prefix, name in _UNBUILT.items() if ".".join(path).startswith(prefix)), None)
        written = part and node.span.source.kind not in ("default", "environment")
        if written and data_of(node) != as_data(default_at(path, loaded.settings.kinds)):
            raise ShoalError(f"`{node.user_path}` ({node.span}): {part} is not built yet")


class Parts(NamedTuple):
    """What a run is made of, before it moves."""

    run: Run
    data: data.Data
    engine: SingleEngine
    feed: data.Feed


def assemble(run: Run, progress: Progress | None = None, tokenizer_of: Path | None = None) -> Parts:
    """Data, networks, task, engine: the same for the same run, every time. A run that goes on keeps the tokenizer in its folder."""
    saved = tokenizer_of / "tokenizer" if tokenizer_of else None
    source = run.replace(data=run.data.replace(tokenizer=str(saved))) if saved and saved.is_dir() else run
    samples = data.load(source, progress=progress)
    players: dict[str, nn.Module] = models.build(run, samples.info)
    tokenizer = samples.info.tokenizer
    task = tasks.build(run, players, samples.info, tokenizer.eos_id if tokenizer else None)
    torch.manual_seed(run.seed)
    batch_size, seed = run.training.batch_size, run.data.shuffle_seed
    assert batch_size is not None  # derived with the configuration, like the seed
    assert seed is not None
    feed = data.Feed(
        samples.train,
        batch_size=batch_size,
        seed=seed,
        drop_last=run.data.loader.drop_last,
        reshuffle=run.data.reshuffle_each_epoch,
        loader=run.data.loader,
    )
    engine = SingleEngine(run, task, choose_device(run.training.device), total_steps(run, feed.batches_per_epoch))
    return Parts(run, samples, engine, feed)


def total_steps(run: Run, batches_per_epoch: int | None) -> int:
    """The length of the run: max_steps or the epochs, whichever comes first."""
    accumulation, batch_size, whole = run.training.gradient_accumulation_steps, run.training.batch_size or 0, run.training.global_batch_size
    if whole is not None and whole != batch_size * accumulation:
        raise ShoalError(
            f"training.global_batch_size is {whole}, and one device takes {batch_size} × {accumulation} samples a step "
            f"(training.batch_size × training.gradient_accumulation_steps)"
        )
    if batches_per_epoch and accumulation > batches_per_epoch * (run.training.epochs or accumulation):
        raise ShoalError(f"training.gradient_accumulation_steps: the run has fewer than {accumulation} batches")
    limits = [run.training.max_steps] if run.training.max_steps else []
    if run.training.epochs and batches_per_epoch:
        limits.append(max(1, run.training.epochs * batches_per_epoch // run.training.gradient_accumulation_steps))
    if not limits:
        raise ShoalError("a stream has no end: set training.max_steps")
    return min(limits)


def held_out(run: Run, samples: data.Samples | None) -> Callable[[], Iterator[data.Batch]] | None:
    """Batches of the held-out data, from the start at each call."""
    if samples is None or run.evaluation.strategy == "never":
        return None
    size, most = run.evaluation.batch_size or 32, run.evaluation.batches

    def batches() -> Iterator[data.Batch]:
        for number, start in enumerate(range(0, len(samples), size)):
            if most is not None and number >= most:
                return
            yield samples.batch(range(start, min(start + size, len(samples))))

    return batches


def prepare(loaded: Loaded, *, run_dir: str | None, resume: bool, reporters: list[Reporter], progress: Progress | None = None) -> Loop:
    """A loop that is ready to train, new or continued."""
    refuse_unbuilt(loaded)
    run = loaded.run
    warn = _warner(reporters)
    directory, checkpoint = _continued(run, run_dir, warn) if resume else (None, None)
    start = find(run.checkpoint.resume_from, warn) if run.checkpoint.resume_from and checkpoint is None else None
    parts = assemble(run, progress, directory.path if directory else None)
    if directory is None:
        directory = RunDirectory.create(run, run_dir)
    if checkpoint is None:
        directory.forget_after(-1)
    if run.training.schedule.warmup_steps >= parts.engine.total_steps:
        warn(f"the warm-up of {run.training.schedule.warmup_steps} steps does not end within the run of {parts.engine.total_steps}")
    directory.write_config(loaded)
    _write_info(directory, parts.data.info)
    loop = Loop(run, parts.engine, parts.feed, held_out(run, parts.data.eval), directory, reporters, _sampler(parts, directory))
    if checkpoint is not None:
        loop.resume(checkpoint, same_run=True)
    elif start is not None:
        loop.resume(start, same_run=False)
    return loop


def _warner(reporters: list[Reporter]) -> Callable[[str], None]:
    def warn(text: str) -> None:
        for reporter in reporters:
            reporter.message(f"warning: {text}")

    return warn


def _continued(run: Run, run_dir: str | None, warn: Callable[[str], None]) -> tuple[RunDirectory, Checkpoint | None]:
    """The run to go on with: the one that is named, or the newest with the same settings."""
    directory = RunDirectory(Path(run_dir)) if run_dir else _newest_like(run)
    if directory is None:
        raise ShoalError(f"there is no earlier run with these settings in {run.output_dir}: name one with --run-dir")
    if not (directory.path / "config.yaml").exists():
        raise ShoalError(f"there is no run at {directory.path} to resume")
    if not same_settings(_config_of(directory), run):
        raise ShoalError(
            f"{directory.path} was started with other settings: `shoal config diff {directory.path}/config.yaml -- FILE…` shows them"
        )
    checkpoint = Checkpoints(directory.path / "checkpoints", run.checkpoint.keep_last).newest(warn)
    if checkpoint is None:
        warn(f"{directory.path} has no checkpoint yet: it starts over")
    return directory, checkpoint


def _newest_like(run: Run) -> RunDirectory | None:
    found = sorted(Path(run.output_dir).rglob("config.yaml"), key=lambda path: path.stat().st_mtime, reverse=True)
    for path in found:
        directory = RunDirectory(path.parent)
        try:
            if same_settings(_config_of(directory), run):
                return directory
        except ShoalError:  # of another version, or no run at all
            continue
    return None


def _config_of(directory: RunDirectory) -> Run:
    return resolve([File(str(directory.path / "config.yaml"))], dialect="shoal", resolved=True).run


# --- what a finished run is used for ------------------------------------------------------------------


class Shapes(NamedTuple):
    """What the networks must know of the data, kept with the run."""

    image_shape: tuple[int, int, int] | None
    num_classes: int | None
    vocab_size: int | None


def _write_info(directory: RunDirectory, info: data.Info) -> None:
    shapes = {"image_shape": info.image_shape, "num_classes": info.num_classes, "vocab_size": info.vocab_size}
    (directory.path / "data.json").write_text(json.dumps(shapes | {"name": info.name}), encoding="utf-8")
    if info.tokenizer is not None:
        info.tokenizer.save(directory.path / "tokenizer")


class Trained(NamedTuple):
    """A run's networks with the weights of its newest checkpoint."""

    run: Run
    task: tasks.Task
    checkpoint: Checkpoint
    tokenizer: data.Tokenizer | None
    root: Path


def open_run(path: str, warn: Callable[[str], None]) -> Trained:
    """The networks of a past run, without its data. Raises ShoalError."""
    folder = Path(path)
    root = folder.parent.parent if (folder / "state.json").exists() else folder
    if not (root / "config.yaml").exists() or not (root / "provenance.json").exists():
        raise ShoalError(f"there is no run at {path}: `shoal runs` lists those there are")
    run = _config_of(RunDirectory(root))
    try:
        raw: dict[str, Any] = json.loads((root / "data.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        raise ShoalError(f"the run at {path} was cut off before it began: it has no data.json") from None
    shape = raw["image_shape"]
    shapes = Shapes(tuple(shape) if shape else None, raw["num_classes"], raw["vocab_size"])
    tokenizer = data.load_tokenizer(str(root / "tokenizer")) if (root / "tokenizer").is_dir() else None
    task = tasks.build(run, models.build(run, shapes), shapes, tokenizer.eos_id if tokenizer else None)
    checkpoint = find(path, warn)
    SingleEngine(run, task, choose_device(run.training.device), 1).load_weights(checkpoint.weights)
    for player in task.players.values():
        player.eval()
    return Trained(run, task, checkpoint, tokenizer, root)


def generate_text(trained: Trained, prompt: str, *, max_new_tokens: int, seed: int, decoding: Any = None) -> Iterator[str]:
    """The text that follows a prompt, piece by piece."""
    if trained.tokenizer is None:
        raise ShoalError(f"a model of kind {trained.run.model.kind} does not write text; --grid draws images")
    yield from _write(
        trained.task.players["model"], trained.tokenizer, prompt, max_new_tokens, seed, decoding or trained.run.serving.decoding
    )


def _write(model: nn.Module, tokenizer: data.Tokenizer, prompt: str, count: int, seed: int, decoding: Any) -> Iterator[str]:
    device = next(model.parameters()).device
    start = tokenizer.encode(prompt) or [tokenizer.eos_id if tokenizer.eos_id is not None else 0]
    generator = torch.Generator(device).manual_seed(seed)
    ids, said = list(start), ""
    stream = models.generate(
        model, torch.tensor([start], device=device), max_new_tokens=count, decoding=decoding, generator=generator, eos_id=tokenizer.eos_id
    )
    before = tokenizer.decode(start)
    for token in stream:
        if tokenizer.eos_id is not None and int(token) == tokenizer.eos_id:
            return
        ids.append(int(token))
        text = tokenizer.decode(ids)[len(before) :]
        if not text.endswith("�"):  # half of a character: wait for the rest
            yield text[len(said) :]
            said = text


def _sampler(parts: Parts, directory: RunDirectory) -> Callable[[int], None]:
    """What the run shows of itself at each evaluation: a grid of images, or a piece of text."""
    task, run, tokenizer = parts.engine.task, parts.run, parts.data.info.tokenizer
    folder = directory.path / "samples"

    def images(step: int) -> None:
        save_png(grid(task.images()), folder / f"step-{step:08d}.png")  # type: ignore[attr-defined]

    def text(step: int) -> None:
        assert tokenizer is not None
        model = task.players["model"]
        model.eval()
        folder.mkdir(exist_ok=True)
        written = "".join(_write(model, tokenizer, "", 64, run.seed, run.serving.decoding))
        (folder / f"step-{step:08d}.txt").write_text(written, encoding="utf-8")
        model.train()

    if run.task == "gan":
        return images
    return text if run.task == "language-modelling" else lambda step: None
