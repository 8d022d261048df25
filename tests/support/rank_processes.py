"""Functions of tests that run in several processes at once, each of which is one rank. `together(name, count)` returns what each found.

This file is also what the processes run: `python rank_processes.py RESULT NAME …`, with the place in the environment.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections.abc import Sequence
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from shoal.config import Run
from shoal.config.data_shapes import DataShapes
from shoal.config.load import resolve_data
from shoal.config.ranks import RankPlace, rank_environment, rank_place
from shoal.config.schema.serving import Decoding
from shoal.config.schema.training import Ema
from shoal.data import load_tokenizer
from shoal.engines import Engine, SingleEngine, World, build, choose_device, enter
from shoal.launch import forkserver
from shoal.models import build as build_models
from shoal.models.generation.generate import generate
from shoal.models.layers.cross_attention import WithCrossAttention
from shoal.models.layers.expert_layer import ExpertLayer
from shoal.models.layers.rank_exchange import RankExchange, Transfer
from shoal.models.routers.base import LearnedRouter
from shoal.runs.folder.checkpoint import Checkpoints
from shoal.runs.monitoring.best_weights import BestWeights, newest_best
from shoal.runs.rlhf.rollouts import RolloutFeed, RolloutPrompt
from shoal.tasks import Batch
from shoal.tasks import build as build_task
from shoal.tasks.answer_logprobs import Reference
from shoal.tasks.gan import Gan
from shoal.tasks.language import LanguageModelling

STEPS, BATCH, ACCUMULATION = 25, 8, 2
PLAIN = {"name": "SGD", "learning_rate": 0.5}
"""An optimizer that does not blow differences in the last digit up."""


DEVICE = os.environ.get("SHOAL_TEST_DEVICE", "cpu")
"""Where the ranks compute: on GPUs they are as many as there are of those, and speak NCCL."""
DDP, FSDP = json.dumps({"kind": "ddp"}), json.dumps({"kind": "fsdp"})
KEPT = json.dumps({"kind": "fsdp", "reshard_after_forward": False})
ZERO = [json.dumps({"kind": "deepspeed", "zero_stage": stage, "stage3_param_persistence_threshold": 10}) for stage in (1, 2, 3)]
OFFLOADED = [json.dumps({"kind": "deepspeed", "zero_stage": stage, "cpu_offload": True}) for stage in (1, 2, 3)]
needs_deepspeed = pytest.mark.skipif(find_spec("deepspeed") is None, reason="DeepSpeed is not installed (shoal[deepspeed])")


LOADS = (
    "torch._dynamo",
    "torch.distributed.checkpoint",
    "torch.distributed.pipelining",
    "shoal.engines.fsdp",
    "shoal.engines.pipeline",
    "pytest",
)


def together(name: str, count: int, *arguments: str, device: str = "cpu") -> list[Any]:
    """Run a function of this file in `count` processes. Returns the result of each; no process is left behind."""
    with tempfile.TemporaryDirectory() as folder:
        results = [Path(folder) / f"{rank}.json" for rank in range(count)]
        logs = [result.with_suffix(".log") for result in results]
        processes = []
        for rank in range(count):
            here = RankPlace(rank, count, rank, count, file=f"{folder}/meeting")
            environ = os.environ | rank_environment(here) | {"OMP_NUM_THREADS": "1", "DS_ACCELERATOR": device, "SHOAL_TEST_DEVICE": device}
            command = [__file__, str(results[rank]), name, *arguments]
            with logs[rank].open("wb") as log:
                processes.append(forkserver.start(command, env=environ, stdout=log, stderr=log, loads=LOADS if device == "cpu" else ()))
        try:
            codes = [process.wait(600) for process in processes]
        finally:
            for process in processes:
                process.kill()
                process.wait()
                process.stdin.close()
        assert not any(codes), "\n".join(log.read_text()[-3000:] for log in logs)
        return [json.loads(result.read_text()) for result in results]


def run_of(engine: dict[str, Any], model: dict[str, Any] | None = None, **training: Any) -> Run:
    model = model or {"kind": "gpt", "hidden_size": 16, "num_layers": 2, "num_heads": 2, "max_seq_len": 12}
    settings = {
        "batch_size": BATCH,
        "gradient_accumulation_steps": ACCUMULATION,
        "max_steps": STEPS,
        "optimizer": {"learning_rate": 3e-3, "weight_decay": 0.1},
        "schedule": {"kind": "cosine", "warmup_steps": 5},
        "clipping": {"max_norm": 0.5},
        "device": DEVICE,
    } | training
    tree = {"model": model, "engine": engine, "training": settings}
    if engine.get("experts"):  # a run without other workers has all of them
        tree |= {"strategy": {"kind": "edp"}}
    return resolve_data(tree, name="test", dialect="shoal", environ={}).run


def engine_of(world: World | None = None, engine: dict[str, Any] | None = None, **training: Any) -> Engine:
    run = run_of(engine or {"kind": "single"}, **training)
    task = LanguageModelling(build_models(run, DataShapes(vocab_size=61)))
    device = choose_device(run.training.device, world.rank if world else 0)
    return build(run, task, device, STEPS, world) if world else SingleEngine(run, task, device, STEPS)


def batches(step: int, rank: int = 0, size: int = 1) -> list[Batch]:
    """The batches of a step, or a rank's part of them. Rows are of very different lengths, so that means of means would be wrong."""
    generator = torch.Generator().manual_seed(step)
    found = []
    for _ in range(ACCUMULATION):
        ids = torch.randint(61, (BATCH * 2, 13), generator=generator)
        labels = ids[:, 1:].clone()
        for row, length in enumerate(torch.randint(1, 13, (BATCH * 2,), generator=generator).tolist()):
            labels[row, length:] = -100
        labels[1::2, 3:] = -100
        found.append({"input_ids": ids[rank::size, :-1].contiguous(), "labels": labels[rank::size].contiguous()})
    return found


def losses_of(engine: Engine, first: int = 0, last: int = STEPS) -> list[float]:
    """The loss of each step over all ranks."""
    world = engine.world
    found = []
    for step in range(first, last):
        result = engine.step(batches(step, world.rank, world.size))
        found.append(float(world.total(result.metrics)["loss"]))
    return found


# --- what runs in ranks ------------------------------------------------------------------------------


def several(world: World, *asked: str) -> dict[str, Any]:
    """Several functions of this file, one after the other: to start processes takes longer than most of them."""
    return {name: globals()[name](world, *arguments) for name, *arguments in map(json.loads, asked)}


def agreement(world: World, *engines: str) -> dict[str, Any]:
    """The losses of each engine, step by step."""
    return {text: losses_of(engine_of(world, json.loads(text))) for text in engines}


def averages(world: World | None, *engines: str) -> dict[str, Any]:
    """The average of the weights after three steps, and the one that an engine restores from its whole tensors."""
    found: dict[str, Any] = {}
    for text in engines:
        engine = engine_of(world, json.loads(text), optimizer=PLAIN)
        engine.keep_average(Ema(decay=0.8))
        losses_of(engine, 0, 3)
        with engine.averaged():
            found[text] = {"average": engine.vector.tolist(), "evaluated": engine.evaluate(iter(batches(7)))}
        named = engine.state_dict()["average"]["weights"]
        whole = {name: value.full_tensor() if hasattr(value, "full_tensor") else value.clone() for name, value in named.items()}
        engine.load_state_dict(engine.state_dict() | {"average": {"steps": 3, "weights": whole}})
        with engine.averaged():
            found[text]["restored"] = engine.vector.tolist()
    return found


def best(world: World, folder: str, engine: str) -> list[float]:
    """Keep the best weights of three evaluations, and read them back."""
    made = engine_of(world, json.loads(engine), optimizer=PLAIN)
    settings = run_of(json.loads(engine))
    run = settings.replace(checkpoint=settings.checkpoint.replace(best="loss"))
    kept = BestWeights(run, made.task, Path(folder), world, evaluated=True)
    for step, loss in enumerate([2.0, 1.0, 3.0]):
        losses_of(made, step, step + 1)
        if kept.is_improved_by({"loss": loss}):
            kept.keep({"loss": loss}, step, made.weights())
    again = BestWeights(run, made.task, Path(folder), world, evaluated=True)
    again.open()
    found = newest_best(Path(folder), print)
    assert found is not None
    made.load_weights(found.weights)
    return [again.step, again.value, *made.vector.tolist()]


def half_agreement(world: World, *engines: str) -> dict[str, Any]:
    """The same in bfloat16, activations computed twice."""
    settings: dict[str, Any] = {"precision": {"kind": "bf16"}, "gradient_checkpointing": True}
    return {text: losses_of(engine_of(world, json.loads(text), **settings)) for text in engines}


def flat_view(world: World, *engines: str) -> dict[str, Any]:
    """The gradient of the third batch, after two that came to nothing, and the weights after it is applied, as every rank sees them."""
    found = {}
    for text in engines:
        engine = engine_of(world, json.loads(text), optimizer=PLAIN)
        for step in range(3):
            engine.gradients(batches(step, world.rank, world.size))
        gradient = engine.gradient.clone()
        engine.apply(gradient, 10)
        found[text] = {"gradient": gradient.tolist(), "vector": engine.vector.tolist()}
    return found


MIXTURE = {
    "kind": "moe",
    "hidden_size": 16,
    "num_layers": 2,
    "num_heads": 2,
    "max_seq_len": 12,
    "intermediate_size": 8,
    "experts": {
        "count": 8,
        "router": "sigmoid-bias",
        "capacity_factor": None,
        "aux_loss_weight": 0.5,
        "z_loss_weight": 0.1,
        "bias_step": 0.01,
    },
}
FEATURES = MIXTURE | {
    "mixture_of_heads": {"enabled": True, "active_share": 0.5, "shared_heads": 0, "balance_weight": 0.5},
    "mixture_of_activations": {"enabled": True},
    "cross_attention": {"enabled": True, "every_layers": 1},
    "retrieval": {"enabled": True, "chunk_size": 4},
}
REMEMBERING = FEATURES | {"episodic_memory": {"enabled": True, "capacity": 8, "chunk_size": 4, "replay_rate": 0.25}}
IDLE = "blocks.0.feed_forward.router.bias_E"


def mixture_engine(
    world: World | None, engine: dict[str, Any], settings: dict[str, Any] = MIXTURE, double: bool = False, **training: Any
) -> Engine:
    """An engine with a mixture in which one expert is never chosen. `double`: in float64."""
    run = run_of(engine, settings, **{"optimizer": PLAIN} | training)
    players = build_models(run, DataShapes(vocab_size=61))
    if IDLE in dict(players["model"].named_buffers()):
        players["model"].get_buffer(IDLE)[0] = -1.0
    if double:
        players["model"].double()
    task, device = LanguageModelling(players), choose_device(DEVICE, world.rank if world else 0)
    return build(run, task, device, STEPS, world) if world else SingleEngine(run, task, device, STEPS)


def mixture_of(world: World | None, engine: dict[str, Any], **training: Any) -> tuple[list[float], list[float]]:
    """The gradient of the third step of a mixture, and the biases that the steps before left."""
    made = mixture_engine(world, engine, **training)
    for step in range(2):
        made.step(batches(step, made.world.rank, made.world.size))
    made.gradients(batches(2, made.world.rank, made.world.size))
    return made.gradient.tolist(), made.buffers.tolist()


def writing(world: World, *engines: str) -> dict[str, Any]:
    """What a mixture writes before and after a step, while its parameters are sharded."""
    found = {}
    for text in engines:
        made = mixture_engine(world, json.loads(text))
        model = made.task.players["model"]
        found[text] = []
        for _ in range(2):
            made.task.players["model"].eval()
            prompt, way = torch.tensor([[1, 2, 3]]), Decoding(active="greedy")
            found[text].append([int(one) for one in generate(model, prompt, max_new_tokens=5, decoding=way)])
            made.task.players["model"].train()
            made.step(batches(0, made.world.rank, made.world.size))
    return found


def half_mixtures(world: World, *engines: str) -> dict[str, Any]:
    """The losses of a few steps in bfloat16, and whether the routers' weights are rounded for them."""
    found: dict[str, Any] = {}
    for text in engines:
        made, types = mixture_engine(world, json.loads(text), precision={"kind": "bf16"}), set()
        for module in made.task.players["model"].modules():
            if isinstance(module, LearnedRouter):
                module.register_forward_pre_hook(lambda module, _, types=types: types.add(str(module.weight.dtype)))
        losses = losses_of(made, 0, 5)
        found[text] = {"losses": losses, "types": sorted(types)}
    return found


def mixtures(world: World, *engines: str) -> dict[str, Any]:
    """The mixture's gradient and biases under each engine, as every rank sees them."""
    return {text: mixture_of(world, json.loads(text), gradient_checkpointing=True) for text in engines}


def with_passages(step: int, rank: int = 0, size: int = 1) -> list[Batch]:
    """The batches of a step with two passages for each row, one to be read by the second chunk and one by the third."""
    found = batches(step, rank, size)
    for batch in found:
        ids = batch["input_ids"]
        starts = torch.tensor([4, 8]).expand(len(ids), 2)
        batch |= {"passage_ids": torch.stack([ids[:, :5], ids[:, 3:8]], dim=1), "passage_from": starts}
    return found


def feature_gradient(world: World | None, engine: dict[str, Any], **training: Any) -> tuple[list[float], list[float]]:
    """The gradient of the third step of a mixture with every feature that is the same in one process and in several, and the biases that
    the steps before left."""
    made = mixture_engine(world, engine, FEATURES, **training)
    for step in range(2):
        made.step(with_passages(step, made.world.rank, made.world.size))
    made.gradients(with_passages(2, made.world.rank, made.world.size))
    return made.gradient.tolist(), made.buffers.tolist()


def features(world: World, *engines: str) -> dict[str, Any]:
    return {text: feature_gradient(world, json.loads(text), gradient_checkpointing=True) for text in engines}


def remembering(world: World, *engines: str) -> dict[str, Any]:
    """The losses of a few steps of a mixture that replays what it remembers, and all that it has kept then."""
    found = {}
    for text in engines:
        made = mixture_engine(world, json.loads(text), REMEMBERING, gradient_checkpointing=True)
        losses = [float(world.total(made.step(with_passages(step % 2, world.rank, world.size)).metrics)["loss"]) for step in range(6)]
        memory: Any = made.task.players["model"].memory
        found[text] = {"losses": losses, "kept": [*made.buffers.tolist(), *memory.importance_N.tolist(), *memory.ids_NT.flatten().tolist()]}
    return found


def statistics(world: World) -> dict[str, Any]:
    """A GAN with BatchNorm after two steps."""
    model = {"kind": "dcgan", "generator_features": 4, "discriminator_features": 4, "latent_dim": 4}
    data = {"model": model, "training": {"batch_size": 4}, "engine": {"kind": "ddp"}}
    run = resolve_data(data, name="test", dialect="shoal", environ={}).run
    engine = build(run, Gan(build_models(run, DataShapes((1, 64, 64))), 4, 0), torch.device("cpu"), 10, world)
    torch.manual_seed(world.rank)
    for _ in range(2):
        engine.step([{"image": torch.rand(4, 1, 64, 64)}])
    assert isinstance(engine, SingleEngine)
    return {"vector": float(engine.vector.double().sum()), "buffers": engine.buffers.tolist()}


def small_last_batch(world: World) -> list[float]:
    """A step in which the second rank has no sample of its own."""
    engine = engine_of(world, {"kind": "ddp"}, gradient_accumulation_steps=1, optimizer=PLAIN)
    whole = batches(0)[0]
    engine.step([{name: value[world.rank :: world.size] for name, value in whole.items()}])
    engine.step([{name: value[:1][world.rank :: world.size] for name, value in whole.items()}])
    vector: list[float] = engine.vector.tolist()
    return vector


LETTERS = ["Once upon", "a", "boat went", "to", "the sea and"]
READING = {
    "kind": "moe",
    "hidden_size": 16,
    "num_layers": 2,
    "num_heads": 2,
    "max_seq_len": 12,
    "experts": {"count": 2, "per_token": 1, "capacity_factor": None, "aux_loss_weight": 0.5},
    "cross_attention": {"enabled": True, "every_layers": 1},
    "retrieval": {"enabled": True, "chunk_size": 3, "passage_tokens": 3},
}
LEARNING: dict[str, dict[str, Any]] = {
    "PPO": {},
    "with a head": {"value": "head"},
    "RLOO": {"algorithm": "rloo"},
    "online DPO": {"algorithm": "online-dpo"},
    "reading": {"model": READING},
}
"""Ways to learn from a reward."""


class Repeats:
    """Finds for a chunk the chunk itself."""

    folder, index, chunk_size = Path(), None, 3

    def text_columns(self, texts: Sequence[Sequence[int]], own: Sequence[Sequence[str]], starts: Sequence[int]) -> dict[str, Tensor]:
        chunks = max(1, (max(map(len, texts)) - 1) // 3)
        rows = [[[*text[3 * u : 3 * u + 3]] if len(text) > 3 * u + 3 else [-1] * 3 for u in range(chunks)] for text in texts]
        return {"passage_ids": torch.tensor(rows), "passage_from": torch.tensor(starts)[:, None] + 3 * torch.arange(1, chunks + 1)}


BYTES = DataShapes(vocab_size=257)


def policy_feed(world: World | None, engine: dict[str, Any], rlhf: dict[str, Any]) -> tuple[Engine, RolloutFeed]:
    """A policy and what it learns from: answers are to have capital letters and digits."""
    ppo = {"rollout_size": 12, "mini_batch_size": 6, "epochs": 2, "steps": 2, "response_length": 5, "prompt_length": 7, "stop_kl": 0.9}
    training = {"optimizer": PLAIN, "device": DEVICE, "gradient_accumulation_steps": 1 if "algorithm" in rlhf else 2}
    ways = {name: value for name, value in rlhf.items() if name != "model"}
    reads = "model" in rlhf
    tree = {"model": rlhf.get("model", DEEP), "engine": engine, "training": training}
    tree["rlhf"] = {"ppo": ppo, "group_size": 4, "kl": {"target": 0.1}} | ways
    run = resolve_data(tree, name="test", dialect="shoal", environ={}).run
    assert run.rlhf is not None
    players = build_models(run, BYTES)
    for part in (part for player in players.values() for part in player.modules() if isinstance(part, WithCrossAttention)):
        part.gate.data.fill_(0.7)
    task: Any = build_task(run, players, BYTES)
    reference = Reference(players["model"])
    device = choose_device(DEVICE, world.rank if world else 0)
    made = build(run, task, device, 8, world) if world else SingleEngine(run, task, device, 8)
    tokenizer = load_tokenizer("bytes")
    asked = [
        RolloutPrompt(tokenizer.encode(text)[-7:], text, context_ids=tuple(range(n)) if reads else ()) for n, text in enumerate(LETTERS)
    ]

    def score(answers: Any) -> list[float]:
        return [sum(letter < "a" for letter in one.text) / 5 for one in answers]

    return made, RolloutFeed(run, task, tokenizer, asked, asked, score, made, reference, Repeats() if reads else None)


def policy_after(world: World | None, engine: str, rlhf: dict[str, Any]) -> dict[str, Any]:
    """A policy that has learned from two rollouts, what it found out about them, and its answers to held-out prompts."""
    made, feed = policy_feed(world, json.loads(engine), rlhf)
    while feed.epoch + feed.at_epoch_end < 2:
        made.step([next(feed) for _ in range(feed.batches_per_step)])
    judged = made.evaluate(feed.answers_to_held_out())
    return {"vector": made.vector.tolist(), "figures": feed.figures, "judged": judged, "position": feed.position}


def policies(world: World, *asked: str) -> dict[str, Any]:
    """What policies learn: each is asked for as an engine and a way to learn."""
    return {text: policy_after(world, json.dumps(engine), LEARNING[way]) for text in asked for engine, way in [json.loads(text)]}


PIPELINE = json.dumps({"kind": "pipeline", "micro_batches": 2})
DEEP = {"kind": "gpt", "hidden_size": 16, "num_layers": 3, "num_heads": 2, "max_seq_len": 12}
DEEP_MIXTURE = MIXTURE | {"num_layers": 3}


def pipeline_engine(world: World | None, model: dict[str, Any], engine: dict[str, Any], **training: Any) -> Engine:
    """An engine for a model of three layers; without a world one process, which is given micro-batches as if they were batches."""
    run = run_of(engine, **{"optimizer": PLAIN} | training)
    run = run.replace(model=resolve_data({"model": model}, name="test", dialect="shoal", environ={}).run.model)
    task, device = LanguageModelling(build_models(run, DataShapes(vocab_size=61))), choose_device(DEVICE, world.rank if world else 0)
    return build(run, task, device, STEPS, world) if world else SingleEngine(run, task, device, STEPS)


def cut_in_two(found: list[Batch]) -> list[Batch]:
    """The micro-batches of a step."""
    return [{name: value[half] for name, value in batch.items()} for batch in found for half in (slice(0, BATCH), slice(BATCH, None))]


def learned(engine: Engine, cut: Any = lambda found: found) -> dict[str, Any]:
    """The figures of two steps, the gradient of the third, the weights after it, how it is judged, and what it writes."""
    engine.keep_average(Ema(decay=0.5))
    figures = [engine.world.total(engine.step(cut(batches(step))).metrics) for step in range(2)]
    with engine.averaged():
        average = {"vector": engine.vector.tolist(), "judged": engine.evaluate(iter(batches(7)))}
    engine.gradients(cut(batches(2)))
    gradient = engine.gradient.tolist()
    engine.apply(torch.tensor(gradient), 10)
    judged = engine.evaluate(iter(batches(7)))
    engine.task.players["model"].eval()
    tokens = generate(engine.task.players["model"], torch.tensor([[1, 2, 3]]), max_new_tokens=4, decoding=Decoding(active="greedy"))
    written = [int(one) for one in tokens]
    engine.task.players["model"].train()
    return {
        "figures": [{name: float(value) for name, value in one.items()} for one in figures],
        "gradient": gradient,
        "vector": engine.vector.tolist(),
        "buffers": engine.buffers.tolist(),
        "judged": judged,
        "written": written,
        "average": average,
    }


def dropped(world: World) -> list[float]:
    """The gradient of a model that drops a good part of everything."""
    engine = pipeline_engine(world, DEEP | {"dropout": 0.4}, json.loads(PIPELINE), gradient_checkpointing=True)
    torch.manual_seed(5 + world.rank)
    engine.step(batches(0))
    engine.gradients(batches(1))
    gradient: list[float] = engine.gradient.tolist()
    return gradient


def saved(engine: Engine, folder: str) -> None:
    """Two steps, and a checkpoint of them."""
    losses_together(engine, 0, 2)
    Checkpoints(Path(folder), 1).save(2, engine.weights(), {"engine": engine.state_dict()}, engine.world)


def gone_on(engine: Engine, folder: str) -> list[float]:
    """The losses of two more steps after a checkpoint, and of the average of the weights."""
    found = Checkpoints(Path(folder), 1).newest(print)
    assert found is not None
    engine.load_weights(found.weights)
    engine.load_state_dict(found.state["engine"])
    return [*losses_together(engine, 2, 4), loss_of_average(engine)]


def loss_of_average(engine: Engine) -> float:
    with engine.averaged():
        return engine.evaluate(iter(batches(7)))["loss"]


def losses_together(engine: Engine, first: int, last: int) -> list[float]:
    return [float(engine.world.total(engine.step(batches(step)).metrics)["loss"]) for step in range(first, last)]


def with_moments(world: World | None, engine: str) -> Engine:
    """A mixture whose optimizer remembers, and of which some steps are clipped."""
    adam = {"name": "AdamW", "learning_rate": 3e-3, "weight_decay": 0.1}
    made = pipeline_engine(world, DEEP_MIXTURE, json.loads(engine), optimizer=adam, gradient_health={"enabled": True})
    made.keep_average(Ema(decay=0.5))
    return made


def oracle(world: World) -> dict[str, list[float]]:
    """The gradient of a batch as torch's own pipeline takes it."""
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B

    engine = pipeline_engine(None, DEEP | {"tied_embeddings": False}, {"kind": "single"})
    model: Any = engine.task.players["model"]
    batch = batches(0)[0]
    part = Halves(model, world.rank)
    stage = PipelineStage(part, world.rank, 2, torch.device("cpu"))
    counted = (batch["labels"] != -100).sum()
    schedule = Schedule1F1B(stage, 2, loss_fn=lambda logits, labels: summed(logits, labels) / counted, scale_grads=False)
    schedule.step(batch["input_ids"]) if world.first else schedule.step(target=batch["labels"])
    gradient = {name: one.grad for name, one in model.named_parameters() if one.grad is not None}
    return {name: value.flatten().tolist() for name, value in gradient.items()}


def summed(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-100, reduction="sum")


class Halves(torch.nn.Module):
    """Two layers of three, or the last."""

    def __init__(self, model: Any, rank: int) -> None:
        super().__init__()
        self.model, self.rank = model, rank

    def forward(self, given: torch.Tensor) -> torch.Tensor:
        if self.rank == 0:
            ids = given
            x = self.model.embed(ids)
        else:
            ids, x = torch.zeros(given.shape[:2], dtype=torch.long), given
        x = self.model.only(*((0, 2) if self.rank == 0 else (2, 3))).through(x, ids)
        return x if self.rank == 0 else torch.nn.functional.linear(self.model.norm(x), self.model.output_weight)


def pipelines(world: World, folder: str) -> dict[str, Any]:
    """What a GPT and a mixture learn as pipelines; a checkpoint is left, and one of a pipeline of two is gone on with."""
    first: Any = pipeline_engine(world, DEEP, json.loads(PIPELINE))
    cut = [end - start for start, end in pairwise(first.bounds)]  # a layer's measured time decides, and another cut rounds otherwise
    alike = json.loads(PIPELINE) | {"schedule": "gpipe", "layers": cut}
    mixture, gpipe = pipeline_engine(world, DEEP_MIXTURE, json.loads(PIPELINE)), pipeline_engine(world, DEEP, alike)
    found: dict[str, Any] = {name: learned(engine) for name, engine in {"gpt": first, "mixture": mixture, "gpipe": gpipe}.items()}
    found["dropped"] = dropped(world)
    if world.size == 2:
        saved(with_moments(world, PIPELINE), folder)
        untied = pipeline_engine(world, DEEP | {"tied_embeddings": False}, json.loads(PIPELINE) | {"layers": [2, 1]})
        untied.gradients(batches(0)[:1])
        found["untied"] = {name: value.flatten().tolist() for name, value in untied._slopes("model")}
        found["oracle"] = oracle(world)
    found["gone on"] = gone_on(with_moments(world, PIPELINE), folder)
    return found


# --- ranks that share the experts of a mixture ----------------------------------------------------------

ADAM = {"name": "AdamW", "learning_rate": 3e-3, "weight_decay": 0.1}


def answers(world: World, *asked: str) -> list[Any]:
    """The results of functions of this file, one after the other."""
    return [globals()[name](world, *arguments) for name, *arguments in map(json.loads, asked)]


def sharing(ranks: int, **more: Any) -> dict[str, Any]:
    """An engine of which this number of ranks share the experts."""
    return {"kind": "fsdp", "expert_parallel": ranks} | more


def mixture(**experts: Any) -> dict[str, Any]:
    return MIXTURE | {"experts": MIXTURE["experts"] | experts}


def steps_of(world: World | None, engine: dict[str, Any], settings: dict[str, Any], more: dict[str, Any]) -> dict[str, Any]:
    """Three steps of a mixture, most of them clipped, and all that an engine shows after them. `more`: training settings, or a seed."""
    training = {"double": True, "clipping": {"max_norm": 0.05}} | {name: value for name, value in more.items() if name != "seed"}
    made = mixture_engine(world, engine, settings, **training)
    if "seed" in more:
        torch.manual_seed(more["seed"] + made.world.rank)
    figures = [summed_figures(made, made.step(batches(step, made.world.rank, made.world.size)).metrics) for step in range(3)]
    loads = {name: value for name, value in made.figures().items() if "load" in name}
    judged = made.evaluate(iter(batches(7)))["loss"]
    made.gradients(batches(3, made.world.rank, made.world.size))
    gradient = made.gradient.clone()
    made.apply(gradient, 10)
    shown = {"figures": figures, "loads": loads, "judged": judged, "gradient": gradient.tolist(), "norms": made.layer_norms()}
    return shown | {"vector": made.vector.tolist(), "buffers": made.buffers.tolist()}


def summed_figures(made: Engine, metrics: dict[str, torch.Tensor]) -> dict[str, float]:
    """The figures of all ranks, in double precision."""
    return {name: float(made.world.add_up(value.double())) for name, value in metrics.items()}


def written(world: World | None, engine: dict[str, Any]) -> list[int]:
    """What a mixture writes while its experts are on several ranks."""
    model = mixture_engine(world, engine).task.players["model"].eval()
    tokens = generate(model, torch.tensor([[1, 2, 3]]), max_new_tokens=5, decoding=Decoding(active="greedy"))
    return [int(one) for one in tokens]


def idle(world: World | None, engine: dict[str, Any]) -> dict[str, Any]:
    """A step in which all tokens go to two experts, and one in which ranks after the first have no sample."""
    made = mixture_engine(world, engine, mixture(router="switch", aux_loss_weight=0.0), double=True)
    for layer in made.task.players["model"].modules():
        if isinstance(layer, ExpertLayer):
            layer.router.register_forward_hook(to_the_first_two)
    whole = batches(0)[0]
    for rows in (len(whole["labels"]), 1):
        made.step([{name: value[:rows][made.world.rank :: made.world.size] for name, value in whole.items()}])
    return {"vector": made.vector.tolist()}


def exchanged_alone(world: World) -> list[list[float]]:
    """Gradients of a mixture in one rank, in half precision: its rows go through an exchange with itself, and without one."""
    found, group = [], dist.group.WORLD
    assert group is not None
    for exchanged in (True, False):
        made = mixture_engine(world, {"kind": "fsdp"}, precision={"kind": "bf16"})
        for layer in made.task.players["model"].modules():
            if exchanged and isinstance(layer, ExpertLayer):
                layer.rank_exchange = RankExchange(group)
        losses_of(made, 0, 2)
        made.gradients(batches(2))
        found.append(made.gradient.tolist())
    return found


def order(world: World | None, engine: dict[str, Any], settings: dict[str, Any]) -> list[list[str]]:
    """When a layer with a shared expert sends, receives and computes it, in the forward pass and in the backward pass."""
    made, seen = mixture_engine(world, engine, settings, double=True), list[str]()
    (layer,) = (one for one in made.task.players["model"].modules() if isinstance(one, ExpertLayer))
    assert layer.shared is not None
    layer.shared.register_forward_hook(lambda *_: seen.append("shared"))
    layer.shared.register_full_backward_hook(lambda *_: seen.append("shared"))
    with pytest.MonkeyPatch.context() as patched:
        for name, what in (("begin", "send"), ("wait", "receive")):
            usual = getattr(Transfer, name)
            patched.setattr(Transfer, name, lambda *given, usual=usual, what=what, **named: seen.append(what) or usual(*given, **named))
        made.gradients(batches(0, made.world.rank, made.world.size)[:1])
    return [seen[:7], seen[7:]]


def to_the_first_two(_: Any, __: Any, routes: Any) -> Any:
    first_T2 = torch.tensor([[0, 1]]).expand(len(routes.experts_TK), 2)
    return routes._replace(experts_TK=first_T2)


def sharing_with_moments(world: World | None, engine: dict[str, Any], settings: dict[str, Any], more: dict[str, Any] | None) -> Engine:
    made = mixture_engine(
        world, engine, settings, **{"double": True, "optimizer": ADAM, "gradient_health": {"enabled": True}} | (more or {})
    )
    if json.dumps(engine) not in ZERO:
        made.keep_average(Ema(decay=0.5))
    return made


def saved_sharing(
    world: World | None, engine: dict[str, Any], settings: dict[str, Any], folder: str, more: dict[str, Any] | None = None
) -> None:
    """Two steps, and a checkpoint of them."""
    made = sharing_with_moments(world, engine, settings, more)
    losses_in_double(made, 0, 2)
    Checkpoints(Path(folder), 1).save(2, made.weights(), {"engine": made.state_dict()}, made.world)


def resumed_sharing(
    world: World | None, engine: dict[str, Any], settings: dict[str, Any], folder: str, more: dict[str, Any] | None = None
) -> list[float]:
    """The losses of two more steps after a checkpoint, and that of the average of the weights, which ZeRO does not keep."""
    made = sharing_with_moments(world, engine, settings, more)
    found = Checkpoints(Path(folder), 1).newest(print)
    assert found is not None
    made.load_weights(found.weights)
    made.load_state_dict(found.state["engine"])
    losses = losses_in_double(made, 2, 4)
    with made.averaged():
        return [*losses, made.evaluate(iter(batches(7)))["loss"]]


def losses_in_double(made: Engine, first: int, last: int) -> list[float]:
    ours = made.world.rank, made.world.size
    return [summed_figures(made, made.step(batches(step, *ours)).metrics)["loss"] for step in range(first, last)]


def main() -> None:
    here = rank_place()
    assert here is not None
    world = enter(here, choose_device(DEVICE, here.local_rank))
    found = globals()[sys.argv[2]](world, *sys.argv[3:])
    Path(sys.argv[1]).write_text(json.dumps(found))
    world.close()


if __name__ == "__main__":
    main()
