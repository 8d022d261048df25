"""Builds the parts of a run: data, networks, task, engine and feed. Holds: the same settings give the same parts on every machine."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from datetime import datetime
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch
from torch import nn

from shoal import data, models
from shoal.config import Run
from shoal.config.load import LoadedConfig
from shoal.config.ranks import RankPlace, batch_share
from shoal.config.schema.model import Moe
from shoal.config.schema.rlhf import FunctionReward
from shoal.data.interfaces import Progress
from shoal.data.text.tokenizers.lookup import TRAINED
from shoal.engines import Engine, SingleEngine, World, choose_device
from shoal.engines import build as build_engine
from shoal.errors import ShoalError
from shoal.files import make_folder, write_file
from shoal.models.packed.layers import packing
from shoal.runs.folder import plugin_record
from shoal.runs.folder.checkpoint import Checkpoints
from shoal.runs.folder.resume_rules import Settings, changed_settings, forbidden_changes, format_changes, settings_of
from shoal.runs.folder.run_directory import RunDirectory
from shoal.runs.folder.run_reader import DATA
from shoal.runs.live_objects import NO_LIVE_OBJECTS, LiveObjects, data_for, players_for, steps_for, task_for
from shoal.runs.monitoring.recorder import Reporter
from shoal.runs.rlhf.rewards.function import name_of, score_with
from shoal.runs.rlhf.rewards.interface import Score, checked
from shoal.runs.rlhf.rollouts import RolloutFeed, prompts_of
from shoal.runs.training.initial_weights import load_policy_weights, passage_index_of, run_folder_of, save_initial_weights
from shoal.strategies import run_length
from shoal.tasks import Task
from shoal.tasks.answer_logprobs import Reference
from shoal.tasks.images import grid, save_png
from shoal.tasks.policy_gradient import PolicyGradient
from shoal.updates.state_packing import Checkpoint

CountSteps = Callable[[data.Data], int]


class RunParts(NamedTuple):
    run: Run
    data: data.Data
    engine: Engine
    feed: data.Feed

    @property
    def single(self) -> SingleEngine:
        """The engine, which must be the one of a single process: strategies with workers use that."""
        assert isinstance(self.engine, SingleEngine)
        return self.engine

    @property
    def frozen_bytes(self) -> int:
        """Memory of the weights that are not trained, such as those that LoRA adds to."""
        networks = self.engine.task.players.values()
        return sum(value.nbytes for network in networks for value in network.parameters() if not value.requires_grad)


def assemble(
    run: Run,
    progress: Progress | None = None,
    tokenizer_of: Path | None = None,
    length: CountSteps | None = None,
    here: RankPlace | None = None,
    world: World | None = None,
    live: LiveObjects = NO_LIVE_OBJECTS,
    joins: bool = False,
    known: data.Data | None = None,
) -> RunParts:
    """Build data, networks, task and engine. A resumed run takes the tokenizer from its folder, `tokenizer_of`.

    `length`: computes the number of steps; None: that of one worker alone. `here` and `world`: for a process of the engine that the
    settings choose; without them a single process computes, whatever the engine. `live`: objects that the program passes. `joins`: for
    a worker, which gets its weights from a coordinator. `known`: the data, if loaded.
    """
    source = _with_chat_time(_with_parts_of_policy(run, tokenizer_of), world)
    samples = known or data_for(run, live, lambda: data.load(source, progress=progress))
    players = players_for(run, live, samples.info)
    answers = run.strategy.gives_answers and joins
    if answers:  # what scores, and what predicts scores, is the coordinator's
        players = {"model": players["model"]}
    else:
        load_policy_weights(run, players, tokenizer_of)
    task = task_for(run, live, players, samples.info)
    rank, ranks = (world.rank, world.size) if world else (0, 1)
    torch.manual_seed(run.seed + 1_000_003 * rank)
    device = choose_device(run.training.device, here.local_rank if here else 0)
    if answers:
        task.answer_only(samples.info.finder)
    if task.learns_from_answers:
        return _with_rollouts(run, samples, task, device, length, world, live)
    part = batch_share(run, rank, ranks)
    feed = feed_for_seat(run, samples, part=part)
    steps = run_length.alone(run, feed.batches_per_epoch, part[1]) if length is None else length(samples)
    engine = _engine(run, task, device, steps, world, live)
    task.place_frozen(packing(engine.hold, run.serving.weights))
    return RunParts(run, samples, engine, feed)


def _engine(run: Run, task: Task, device: torch.device, steps: int, world: World | None, live: LiveObjects) -> Engine:
    """The engine of a worker; without `world` one process computes, even where the workers of the run are several."""
    if world is not None or not run.engine.several_processes:
        engine = build_engine(run, task, device, steps, world or World())
    else:
        engine = SingleEngine(run, task, device, steps, learns=not task.learns_from_answers)
    if (own := steps_for(run, live, steps)) is not None:
        engine.take_optimizer(own)
    return engine


def _with_chat_time(run: Run, world: World | None) -> Run:
    """The settings with one time for the chat templates of all processes."""
    if run.data.chat_time is not None or world is None or world.size == 1:
        return run
    return run.replace(data=run.data.replace(chat_time=world.broadcast_text(datetime.now().isoformat(timespec="seconds"))))


def _with_parts_of_policy(run: Run, own_folder: Path | None) -> Run:
    """The settings with the tokenizer of the run's folder. A policy uses the tokenizer and the passage index of the run that it starts
    from, unless the settings name others."""
    policy, retrieval = run.rlhf.policy if run.rlhf is not None else None, data.retrieval_of(run)
    saved = own_folder / "tokenizer" if own_folder else run_folder_of(policy) / "tokenizer" if policy else None
    if saved is not None and saved.is_dir():
        own = {"chat_template": None} if own_folder else {}  # the folder holds the template, whatever became of the file it was read from
        run = run.replace(data=run.data.replace(tokenizer=str(saved), **own))
    if policy is None or retrieval is None or retrieval.index is not None or retrieval.passages is not None:
        return run
    index = (passage_index_of(own_folder) if own_folder is not None else None) or passage_index_of(run_folder_of(policy))
    if index is None:
        return run
    assert isinstance(run.model, Moe)
    return run.replace(model=run.model.replace(retrieval=retrieval.replace(index=str(index))))


def _with_rollouts(
    run: Run, samples: data.Data, task: Task, device: torch.device, length: CountSteps | None, world: World | None, live: LiveObjects
) -> RunParts:
    """The parts of a run whose feed generates its batches with the model."""
    assert run.rlhf is not None
    assert samples.info.tokenizer is not None
    ppo = run.rlhf.ppo
    steps = ppo.steps * ppo.epochs * ppo.rollout_size // ppo.mini_batch_size if length is None else length(samples)
    reference = Reference(task.players["model"])  # before an engine cuts the networks into parts
    engine = _engine(run, task, device, steps, world, live)
    reward = reward_for(run, live)
    policy = cast("PolicyGradient", task)  # the only task that learns from answers
    feed = RolloutFeed(run, policy, samples.info.tokenizer, *prompts_of(run, samples), reward, engine, reference, samples.info.finder)
    return RunParts(run, samples, engine, feed)


def reward_for(run: Run, live: LiveObjects) -> Score:
    """The reward of a run: the program's function, or that of the settings."""
    assert run.rlhf is not None
    if live.reward is not None:
        return checked(score_with(live.reward), f"{name_of(live.reward)} (reward=)")
    settings = run.rlhf.reward
    name = settings.function if isinstance(settings, FunctionReward) else None
    return checked(settings.builder()(settings, run), name or f"`{settings.kind}`")


def feed_for_seat(run: Run, samples: data.Data, seat: int = 0, shards: int = 1, part: tuple[int, int] = (0, 1)) -> data.ShardFeed:
    """The batches of a seat. Seats beyond the number of shards read a shard a second time, in another order.

    `part`: index of this process among those of the seat, and their number; each reads `batch_size` samples of a batch.
    """
    if run.scheduled:  # seats are ranges of one order, so positions count in the whole data
        seat, shards = 0, 1
    batch_size, seed = run.training.batch_size, run.data.shuffle_seed
    assert batch_size is not None  # derived with the configuration, like the seed
    assert seed is not None
    return data.ShardFeed(
        samples.train,
        batch_size=batch_size * part[1],
        seed=seed + 1_000_003 * (seat // shards),
        shard=(seat % shards, shards),
        part=part,
        drop_last=run.data.loader.drop_last and not run.strategy.leases_units,
        reshuffle=run.data.reshuffle_each_epoch,
        loader=run.data.loader,
    )


def check_batches(run: Run) -> None:
    """Raises ShoalError where the samples of a run do not make one batch. A tokenizer that is still to be trained is taken to be `bytes`,
    which gives at least as many tokens."""
    run = _with_parts_of_policy(run, None)
    if run.data.tokenizer in TRAINED:
        run = run.replace(data=run.data.replace(tokenizer="bytes"))
    if data.retrieval_of(run) is None:
        feed_for_seat(run, data.load(run))


def held_out_batches(run: Run, samples: data.Samples | None) -> Callable[[], Iterator[data.Batch]] | None:
    """A function that yields the held-out batches from the start; None where the run is not evaluated."""
    if samples is None or run.evaluation.strategy == "never":
        return None
    size, count = evaluation_batch_size(run), held_out_count(run, samples)

    def batches() -> Iterator[data.Batch]:
        for start in range(0, count, size):
            yield samples.batch(range(start, min(start + size, count)))

    return batches


def held_out_count(run: Run, samples: data.Samples) -> int:
    """Number of held-out samples that an evaluation takes."""
    most = run.evaluation.batches
    return len(samples) if most is None else min(len(samples), most * evaluation_batch_size(run))


def evaluation_batch_size(run: Run) -> int:
    return run.evaluation.batch_size or 32


def evaluation_batches(parts: RunParts) -> Callable[[], Iterator[data.Batch]] | None:
    """The batches of an evaluation: held-out data, or answers to held-out prompts; None where the run is not evaluated."""
    if parts.run.evaluation.batches == 0:
        return None
    return parts.feed.evaluation_batches(held_out_batches(parts.run, parts.data.eval))


def warn_reporters(reporters: list[Reporter]) -> Callable[[str], None]:
    def warn(text: str) -> None:
        for reporter in reporters:
            reporter.message(f"warning: {text}")

    return warn


def write_run(loaded: LoadedConfig, parts: RunParts, directory: RunDirectory, reporters: list[Reporter]) -> None:
    """Write the run's settings, the description of its data, and a policy's initial weights. Report settings that a resumed run changes."""
    if changed := directory.write_config(loaded):
        for reporter in reporters:
            reporter.message(f"the run goes on with other settings:{format_changes(changed)}")
    if parts.engine.world.first:
        _write_data_info(directory, parts.data)
        save_initial_weights(loaded.run, directory.path)
        directory.write_manifest()


def find_run_to_resume(run: Run, run_dir: str | None, warn: Callable[[str], None]) -> RunDirectory:
    """The run to resume: the one that is named, or the newest with the same settings. Raises ShoalError where its files are damaged, or
    the settings shape other numbers."""
    directory = RunDirectory(Path(run_dir)) if run_dir else _newest_like(run)
    if directory is None:
        raise ShoalError(f"there is no earlier run with these settings in {run.output_dir}: name one with --run-dir")
    if not (directory.path / "config.yaml").exists():
        raise ShoalError(f"there is no run at {directory.path} to resume")
    directory.check_files()
    before = directory.recorded_settings(warn)
    _warn_of_edits(directory, before, warn)
    if different := forbidden_changes(before, settings_of(run)):
        raise ShoalError(
            f"{directory.path} was started with other settings. These shape its numbers, so they stay as they were; a new run may have "
            f"others:{format_changes(different)}"
        )
    plugin_record.expect_those_of(directory.path)
    return directory


def newest_checkpoint(directory: RunDirectory, run: Run, warn: Callable[[str], None]) -> Checkpoint | None:
    """The newest readable checkpoint of a run without a coordinator, once no other process uses its folder."""
    directory.wait_until_free(warn)
    checkpoint = Checkpoints(directory.path / "checkpoints", run.checkpoint.keep_last).newest(warn)
    if checkpoint is None:
        warn(f"{directory.path} has no checkpoint yet: it starts over")
    return checkpoint


def _warn_of_edits(directory: RunDirectory, before: Settings, warn: Callable[[str], None]) -> None:
    """Warn where config.yaml is not what the run wrote. It is written again from the settings that the run goes on with."""
    try:
        edits = changed_settings(before, settings_of(directory.config()))
    except ShoalError as error:
        warn(f"{directory.path / 'config.yaml'} cannot be read, and is written again: {error}")
        return
    if edits:
        warn(f"{directory.path / 'config.yaml'} was edited or damaged since the run wrote it, and is written again:{format_changes(edits)}")


def _newest_like(run: Run) -> RunDirectory | None:
    found = sorted(Path(run.output_dir).rglob("config.yaml"), key=lambda path: path.stat().st_mtime, reverse=True)
    for directory in (RunDirectory(path.parent) for path in found):
        try:
            if not forbidden_changes(directory.recorded_settings(lambda text: None), settings_of(run)):
                return directory
        except ShoalError:  # of another version, or not a run
            continue
    return None


def _write_data_info(directory: RunDirectory, samples: data.Data) -> None:
    """Describe the run's data for a resumed run and for programs that use its model."""
    info = samples.info
    shapes = {"image_shape": info.image_shape, "num_classes": info.num_classes, "vocab_size": info.vocab_size}
    found = {"passages": str(info.finder.folder.resolve())} if info.finder else {}
    fields = shapes | {"name": info.name, "fingerprint": data.local_fingerprint(samples)} | found
    DATA.write(directory.path / "data.json", fields)
    if info.tokenizer is not None:
        info.tokenizer.save_for_run(directory.path / "tokenizer")


def expect_same_data(directory: RunDirectory, samples: data.Data) -> None:
    """Raises ShoalError where a resumed run would read other data than it began with."""
    before = DATA.read(directory.path / "data.json")
    if before is not None and before["fingerprint"] != data.local_fingerprint(samples):
        raise ShoalError(
            f"the data has changed since {directory.path} began (then: {before['name']}; now: {samples.info.name}): put it back to go on, "
            f"or begin a new run with the weights of this one: --set checkpoint.resume_from={directory.path}"
        )


def stream_text(
    model: nn.Module,
    tokenizer: data.Tokenizer,
    prompt: str,
    count: int,
    seed: int,
    decoding: Any,
    beside: models.SideTexts | None = None,
    prompt_ids: list[int] | None = None,
    end_id: int | None = None,
) -> Iterator[str]:
    """Yield the text that the model generates after a prompt. `beside`: side texts that the model reads; `prompt_ids`: the prompt as it is
    encoded already; `end_id`: a further token that ends the text."""
    start = [*tokenizer.opening, *tokenizer.encode(prompt)] if prompt_ids is None else prompt_ids
    start = start or [tokenizer.eos_id if tokenizer.eos_id is not None else 0]
    text, prompts = data.StreamedText(tokenizer, start), torch.tensor([start])
    stream = models.generate(model, prompts, max_new_tokens=count, decoding=decoding, seed=seed, eos_id=tokenizer.eos_id, beside=beside)
    for token in stream:
        if int(token) in (tokenizer.eos_id, end_id):
            return
        yield text.add(int(token))
    yield text.finish()


def sample_writer(parts: RunParts, directory: RunDirectory) -> Callable[[int], None]:
    """A function that writes a sample at a step: a grid of images, or a piece of text."""
    task, run, tokenizer = parts.engine.task, parts.run, parts.data.info.tokenizer
    folder = directory.path / "samples"

    first = parts.engine.world.first

    def images(step: int) -> None:
        if first:
            save_png(grid(task.images()), folder / f"step-{step:08d}.png")

    def text(step: int) -> None:
        assert tokenizer is not None
        model = task.players["model"]
        model.eval()
        beside = models.make_side_texts(parts.data.info.finder, ())
        with parts.engine.precision():
            written = "".join(stream_text(model, tokenizer, "", 64, run.seed, run.serving.decoding, beside))
        model.train()
        if first:
            write_file(make_folder(folder) / f"step-{step:08d}.txt", written)

    if (write := parts.feed.sample_writer()) is not None:
        return lambda step: write(folder / f"step-{step:08d}.txt") if first else None
    return {"images": images, "text": text, "": lambda step: None}[run.chosen_task.shows]
