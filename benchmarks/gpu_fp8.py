"""fp8 on one GPU of the Hopper generation against bf16: the experts of a layer, the whole step, and what is learned.

The experts' part is the products and SwiGLU of a layer, both passes, with everything that rounds for them. It is measured at the widths of
presets/gpu/base.yaml and of presets/hardware/h100_80gb.yaml, with 16,384 tokens; the whole step at those of base.yaml with all its layers,
and at the others with two. The losses are of a smaller mixture on Python sources, after 300 steps from the same weights on the same
batches; nvfp4 is emulated.
"""

from __future__ import annotations

import gc
import statistics
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import gpu_moe
import torch
from gpu_diloco import text_in
from run import Row
from torch import Tensor

from shoal.config.load import resolve_data
from shoal.config.schema.model import Moe
from shoal.config.schema.training import Fp8
from shoal.engines.precision import fp8
from shoal.models.layers.expert_layer import ExpertAssignment, ExpertLayer

TOKENS, STEPS, LAST = 16 * 1024, 300, 50
SIZES: dict[str, dict[str, Any]] = {
    "base": {"hidden_size": 768, "num_heads": 12, "intermediate_size": 3072, "experts": {"count": 16, "per_token": 2}},
    "h100_80gb": {"hidden_size": 1536, "num_heads": 24, "intermediate_size": 6144, "experts": {"count": 64, "per_token": 8}},
}
TARGETS = {"base": "≥ 1.0", "h100_80gb": "≥ 1.1"}
SMALL = {"hidden_size": 512, "num_layers": 4, "num_heads": 8, "intermediate_size": 1024, "experts": {"count": 8, "per_token": 2}}


def milliseconds(work: Callable[[], None], times: int = 20) -> float:
    """Of both passes as a recording, as a step takes them."""
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        for _ in range(3):
            work()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    graph.replay()
    start.record()
    for _ in range(times):
        graph.replay()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / times


def visits_of(settings: Moe) -> ExpertAssignment:
    """Almost even loads, as a balanced router gives them."""
    rows, count = TOKENS * settings.experts.per_token, settings.experts.count
    chosen = torch.randint(count, (rows,), device="cuda", generator=torch.Generator(device="cuda").manual_seed(0))
    sizes, one = torch.bincount(chosen, minlength=count), torch.zeros(1, dtype=torch.int64, device="cuda")
    return ExpertAssignment(one, one, one, one, sizes, one, None)


def experts_part(name: str, profiled: bool) -> Row:
    """Both passes through the experts of a layer. `profiled`: tell the kernels that take longest, too."""
    run = resolve_data({"model": {"kind": "moe"} | SIZES[name]}, name="bench", dialect="shoal", environ={}).run
    settings: Any = run.model
    with torch.device("cuda"):
        layer = ExpertLayer(settings, 256).to(torch.bfloat16)
    assignment = visits_of(settings)
    rows = TOKENS * settings.experts.per_token
    x = torch.randn(rows, settings.hidden_size, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    gates, slope = torch.rand(rows, device="cuda", requires_grad=True), torch.randn_like(x)

    def passes() -> None:
        layer.zero_grad(set_to_none=True)
        x.grad = gates.grad = None
        layer.experts(x, gates, assignment.sizes_E, assignment.real_R1).backward(slope)

    plain = milliseconds(passes)
    scales = fp8.ScaleHistory(Fp8(), torch.device("cuda"))
    layer.fused_swiglu = fp8.experts(scales, "one", layer.up, layer.down)
    rounded = milliseconds(passes)
    if profiled:
        gpu_moe.profile(passes)
    return Row(f"gpu-fp8, the experts of a layer, {name}", rounded, plain, "ms", plain / rounded, TARGETS[name])


def batches_of(text: Tensor, rows: int, length: int) -> Iterator[dict[str, Tensor]]:
    """Windows of the text, the same ones every time."""
    generator = torch.Generator(device="cuda").manual_seed(0)
    while True:
        starts = torch.randint(len(text) - length - 1, (rows, 1), device="cuda", generator=generator)
        ids = text[starts + torch.arange(length + 1, device="cuda")].long()
        yield {"input_ids": ids[:, :-1].contiguous(), "labels": ids[:, 1:].contiguous()}


def step_ms_and_loss(
    precision: str, model: dict[str, Any], batches: Iterator[dict[str, Tensor]], steps: int, **training: Any
) -> list[float]:
    """Milliseconds of a step, and the mean loss of the last steps."""
    free()
    made = gpu_moe.engine(model=model, precision={"kind": precision}, schedule={"kind": "constant", "warmup_steps": 30}, **training)
    losses = [made.step([next(batches)]).metrics["loss"] for _ in range(steps)]
    batch = next(batches)
    taken = statistics.median(gpu_moe.milliseconds(lambda: made.step([batch]).metrics["loss"]) for _ in range(3))
    made.finish()
    return [taken, float(torch.stack(losses[-LAST:]).mean())]


def free() -> None:
    """Give back the memory of the engine before."""
    gc.collect()
    torch.cuda.empty_cache()
    torch.compiler.reset()


def measure(part: str = "") -> Iterator[Row]:
    """`part`: `experts` (with their kernels), `losses` or `steps` alone."""
    if not torch.cuda.is_available() or not fp8.is_real(torch.device("cuda")):
        print("gpu-fp8: skipped, there is no GPU of the Hopper generation here")
        return
    if part in ("", "experts"):
        yield from (experts_part(name, bool(part)) for name in SIZES)
    if part == "experts":
        return
    with tempfile.TemporaryDirectory() as folder:
        text = torch.frombuffer(bytearray(text_in(Path(folder)).read_bytes()[:40_000_000]), dtype=torch.uint8).cuda()
    if part in ("", "losses"):
        yield from losses(text)
    if part in ("", "steps"):
        yield from whole_steps(text)


def losses(text: Tensor) -> Iterator[Row]:
    plain = {"allow_emulation": True, "compile": False, "cuda_graph": False}
    found = {kind: step_ms_and_loss(kind, SMALL, batches_of(text, 16, 256), STEPS, **plain)[1] for kind in ("bf16", "fp8", "nvfp4")}
    for kind, target in (("fp8", "≤ 1.005"), ("nvfp4", "≤ 1.02")):
        yield Row(f"gpu-fp8, loss in {kind}", found[kind], found["bf16"], "nats/byte", found[kind] / found["bf16"], target)


def whole_steps(text: Tensor) -> Iterator[Row]:
    for name, layers in (("h100_80gb", 2), ("base", 16)):
        # room for all: after so few steps the routers are uneven, and experts that drop half of their tokens are no measure of either
        sizes = SIZES[name] | {"num_layers": layers, "experts": SIZES[name]["experts"] | {"capacity_factor": None}}
        bf16, own = (step_ms_and_loss(kind, sizes, batches_of(text, 16, 1024), 20)[0] for kind in ("bf16", "fp8"))
        yield Row(f"gpu-fp8, the whole step, {name}, {layers} layers", own, bf16, "ms", bf16 / own, "–")
