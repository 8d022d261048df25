"""The mixture of presets/gpu/base.yaml on one GPU in bf16, batch 16 × 1024: tokens/s of `SingleEngine` against Hugging Face's Mixtral.

The peer has the same sizes, bf16 weights, grouped products (`experts_implementation="grouped_mm"`), torch.compile and fused AdamW, and both
clip. Ours also watches gradient health, keeps weights in fp32, and drops what an expert has no room for. Both read Python sources, since
random tokens are too easily spread over the experts; ours learns first, until its routers have spread the text. Runs of both alternate.
Then ours with all penalties, with narrower running means, and a table of where the time goes.
"""

from __future__ import annotations

import gc
import math
import statistics
import sys
import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from gpu_diloco import text_in
from run import Row
from torch import Tensor

from shoal.config.data_shapes import DataShapes
from shoal.config.load import resolve_data
from shoal.engines import SingleEngine
from shoal.models import build
from shoal.tasks.language import LanguageModelling

BATCH, LENGTH, VOCABULARY = 16, 1024, 65536
WIDTH, LAYERS, HEADS, EXPERTS, PER_TOKEN, INNER = 768, 16, 12, 16, 2, 3072
STEPS, ROUNDS, CEILING = 10, 4, 780e12
LEARNING, LOOK_EVERY, JUDGED = 1200, 300, 8
"""Steps that ours learns before it is measured, after how many the choices are counted that find no room, and in how many steps."""
BALANCED = {"experts": {"aux_loss_weight": 0.02 * LAYERS}}
"""0.02 for each layer's loss. Ours weighs their mean, and 0.01 of that spreads this text too slowly: docs/mixtures.md has several."""
PENALTIES = {"repetition_weight": 0.5, "immediate_repetition_weight": 1.0, "eos_weight": 5.0, "min_sequence_length": 20}
SCHEDULE = {"kind": "cosine", "warmup_steps": 2000, "end_learning_rate": 0.0001}
HEALTH = {"enabled": True, "initial_clip_value": 2.0, "final_clip_value": 0.5, "warmup_steps": 2000}

Step = Callable[[], Tensor]


def flops() -> float:
    """Of a step: two for each weight that a token meets, and attention over half of the pairs; three times, for two passes."""
    weights = LAYERS * (4 * WIDTH**2 + PER_TOKEN * 3 * WIDTH * INNER) + WIDTH * VOCABULARY
    return 3 * BATCH * LENGTH * (2 * weights + 2 * LAYERS * LENGTH * WIDTH)


def engine(task: LanguageModelling | None = None, model: dict[str, Any] | None = None, **training: Any) -> SingleEngine:
    """`task`: that of an engine that is finished, whose network is compiled already. `model`: other sizes."""
    sizes = {"hidden_size": WIDTH, "num_layers": LAYERS, "num_heads": HEADS, "intermediate_size": INNER} | (model or {})
    experts = {"count": EXPERTS, "per_token": PER_TOKEN, "capacity_factor": 1.25, "router": "switch", "aux_loss_weight": 0.01}
    sizes |= {"kind": "moe", "max_seq_len": 2048, "experts": experts | sizes.get("experts", {}), "dropout": 0.0}
    optimizer = {"name": "AdamW", "learning_rate": 0.00042, "beta2": 0.95, "weight_decay": 0.1} | training.pop("optimizer", {})
    settings = {
        "precision": {"kind": "bf16"},
        "compile": True,
        "cuda_graph": True,
        "schedule": SCHEDULE,
        "clipping": {"max_norm": 0.5},
        "gradient_health": HEALTH,
    } | training
    whole = {"model": sizes, "training": settings | {"optimizer": optimizer}, "data": {"sequence_length": LENGTH}}
    run = resolve_data(whole, name="bench", dialect="shoal", environ={}).run
    if task is None:
        torch.manual_seed(0)
        with torch.device("cuda"):
            task = LanguageModelling(build(run, DataShapes(vocab_size=VOCABULARY)), eos_id=0)
    task.penalties = run.training.penalties
    return SingleEngine(run, task, torch.device("cuda"), 10_000, learns=True)


def peer(batch: dict[str, Tensor]) -> Step:
    from transformers import MixtralConfig, MixtralForCausalLM

    config = MixtralConfig(
        vocab_size=VOCABULARY, hidden_size=WIDTH, intermediate_size=INNER, num_hidden_layers=LAYERS, num_attention_heads=HEADS,
        num_key_value_heads=HEADS, num_local_experts=EXPERTS, num_experts_per_tok=PER_TOKEN, max_position_embeddings=2048,
        output_router_logits=True, router_aux_loss_coef=0.01, tie_word_embeddings=True, use_cache=False,
    )  # fmt: skip
    config._experts_implementation = "grouped_mm"
    with torch.device("cuda"):
        model = MixtralForCausalLM(config).to(torch.bfloat16).train()
    model.set_experts_implementation("grouped_mm")
    compiled = torch.compile(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.00042, betas=(0.9, 0.95), weight_decay=0.1, fused=True)

    def step() -> Tensor:
        optimizer.zero_grad(set_to_none=True)
        loss = compiled(input_ids=batch["input_ids"], labels=batch["input_ids"]).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        return loss.detach()

    return step


def milliseconds(step: Step, steps: int = STEPS) -> float:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(steps):
        loss = step()
    end.record()
    end.synchronize()
    assert math.isfinite(float(loss))
    return start.elapsed_time(end) / steps


def warmed(made: SingleEngine, batches: Iterator[dict[str, Tensor]], steps: int = 8) -> Step:
    """A step of ours on the next batch; the first ones compile."""

    def step() -> Tensor:
        return made.step([next(batches)]).metrics["loss"]

    for _ in range(steps):
        step()
    return step


def sequences(steps: int) -> Tensor:
    """Enough for so many steps of the Python sources that are installed here, in tokens of a vocabulary that is made of them; shuffled."""
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers

    with tempfile.TemporaryDirectory() as folder:
        text = text_in(Path(folder)).read_text(encoding="utf-8")
    pieces = [text[start : start + 100_000] for start in range(0, len(text), 100_000)]
    tokenizer, alphabet = Tokenizer(models.BPE()), pre_tokenizers.ByteLevel.alphabet()
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.train_from_iterator(pieces[::4], trainers.BpeTrainer(vocab_size=VOCABULARY, show_progress=False, initial_alphabet=alphabet))
    needed, found = steps * BATCH * (LENGTH + 1), list[int]()
    for start in range(0, len(pieces), 64):
        found += [one for piece in tokenizer.encode_batch(pieces[start : start + 64]) for one in piece.ids]
        if len(found) >= needed:
            break
    rows = torch.tensor(found[: len(found) // (LENGTH + 1) * (LENGTH + 1)], device="cuda").view(-1, LENGTH + 1)
    return rows[torch.randperm(len(rows), generator=torch.Generator().manual_seed(0)).cuda()]


def endless(rows: Tensor) -> Iterator[dict[str, Tensor]]:
    while True:
        for ids in rows[: len(rows) // BATCH * BATCH].view(-1, BATCH, LENGTH + 1):
            yield {"input_ids": ids[:, :-1].contiguous(), "labels": ids[:, 1:].contiguous()}


PARTS = {
    "experts' products": ("enable_3x_kernel_for_sm9x", "grouped"),
    "pointwise, compiled": ("triton_",),
    "rotary positions": ("_cut", "_join"),
    "experts' SwiGLU": ("_forward", "_backward"),
    "attention": ("flash", "fmha", "sdpa", "cudnn"),
    "other products": ("nvjet", "gemm", "cutlass", "cublas"),
    "optimizer": ("_step", "_squares", "FusedOpti"),
    "loss": ("_loss_and_gradient", "_punished", "_scale_unless_one"),
    "sorting": ("sort", "Sort", "topk", "TopK", "scan", "searchsorted"),
}


def profile(step: Callable[[], Any], steps: int = 5) -> dict[str, float]:
    """Milliseconds a step in kernels of each part; and the kernels that take longest, on stderr."""
    from torch.autograd import DeviceType
    from torch.profiler import ProfilerActivity

    with torch.profiler.profile(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as found:
        for _ in range(steps):
            step()
        torch.cuda.synchronize()
    parts: dict[str, float] = defaultdict(float)
    kernels = [one for one in found.key_averages() if one.device_type == DeviceType.CUDA and one.self_device_time_total > 0]
    for one in sorted(kernels, key=lambda one: -one.self_device_time_total):
        name = next((part for part, words in PARTS.items() if any(word in one.key for word in words)), "the rest")
        parts[name] += one.self_device_time_total / 1000 / steps
    print(f"  {sum(one.count for one in kernels) / steps:.0f} kernels a step, {sum(parts.values()):.1f} ms", file=sys.stderr)
    for one in sorted(kernels, key=lambda one: -one.self_device_time_total)[:45]:
        print(f"  {one.self_device_time_total / 1000 / steps:8.3f} ms {one.count / steps:6.1f} ×  {one.key[:110]}", file=sys.stderr)
    return dict(parts)


def compared(ours: Step, their: Step) -> dict[str, float]:
    """The median milliseconds of a step of each, measured in turn."""
    times: dict[str, list[float]] = {"ours": [], "peer": []}
    for _ in range(ROUNDS):
        times["ours"].append(milliseconds(ours))
        times["peer"].append(milliseconds(their))
    return {name: statistics.median(found) for name, found in times.items()}


def dropped_and_loss(made: SingleEngine, batches: Iterator[dict[str, Tensor]]) -> tuple[float, float]:
    """Of the choices of some steps, over all layers; and the mean loss of these steps."""
    figures = [made.step([next(batches)]).metrics for _ in range(JUDGED)]
    dropped = statistics.mean(float(value) for one in figures for name, value in one.items() if name.endswith("dropped"))
    return dropped, statistics.mean(float(one["loss"]) for one in figures)


def measure(part: str = "") -> Iterator[Row]:
    """`part`: `short`, without narrower running means."""
    torch.set_float32_matmul_precision("high")
    batches = endless(sequences(LEARNING + 200))
    made = engine(model=BALANCED)
    for done in range(LOOK_EVERY, LEARNING + 1, LOOK_EVERY):
        ours = warmed(made, batches, LOOK_EVERY)
        dropped, loss = dropped_and_loss(made, batches)
        print(f"  after {done} steps {dropped:.2%} of the choices find no room; loss {loss:.3f}", file=sys.stderr, flush=True)
    their = peer(next(batches))
    for _ in range(5):
        their()
    middle, tokens = compared(ours, their), BATCH * LENGTH * 1000
    del their
    torch.cuda.empty_cache()
    dropped, _ = dropped_and_loss(made, batches)
    share = flops() / (middle["ours"] / 1000) / CEILING
    note = f"{share:.0%} of {CEILING / 1e12:.0f} TFLOP/s; {middle['ours']:.1f} ms a step; {dropped:.1%} dropped"
    yield Row("gpu-moe", tokens / middle["ours"], tokens / middle["peer"], "tokens/s", middle["peer"] / middle["ours"], "≥ 1.3", note)
    for name, taken in profile(ours).items():
        yield Row(f"gpu-moe, {name}", taken, middle["ours"], "ms", taken / middle["ours"], "–")
    others: dict[str, dict[str, Any]] = {"with all penalties": {"penalties": PENALTIES}}
    others |= {f"moments in {kind}": {"optimizer": {"moments": kind}} for kind in ("bf16", "fp8") if not part}
    for name, training in others.items():
        task = made.task
        made.finish()
        del ours, made
        gc.collect()
        torch.cuda.empty_cache()
        made = engine(task, BALANCED, compile=False, **training)
        ours = warmed(made, batches)
        taken = statistics.median(milliseconds(ours) for _ in range(ROUNDS))
        yield Row(f"gpu-moe, {name}", tokens / taken, tokens / middle["ours"], "tokens/s", middle["ours"] / taken, "≥ 0.98")
