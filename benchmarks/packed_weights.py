"""Packed weights: how much perplexity they cost, against fp32, and tokens per second of processor time, against llama.cpp.

Perplexity is that of stories15M (../shared/data/lm) on its own texts, and of SmolLM2-135M on Shakespeare (../shared/data/text),
whose GGUF file is also read as it is. llama.cpp reads that file, and one in Q4_0 that Shoal has written from it. Both sides have one
thread; processor time does not depend on what else the machine does. `packed-weights:memory` compares what both take in memory:
ours is the process of `shoal serve` at its peak.
"""

from __future__ import annotations

import math
import re
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import llama_cpp
import torch
from generate import ROOT, our_model
from run import Row
from serve import STREAMS, Model, Ours, asking, serving
from torch import Tensor

from shoal.config.load import parse_override
from shoal.errors import ShoalError
from shoal.models.packed.formats import PackedShape, packed, unpacked
from shoal.models.packed.layers import byte_count
from shoal.models.packed.model import kinds_of
from shoal.serve.load_model import open_served
from shoal.serve.serving_memory import cache_token_bytes

TARGETS = {"bf16": "≤ 1.005", "int8": "≤ 1.005", "int4": "≤ 1.03", "auto": "≤ 1.03"}
ROUNDS, TOKENS, LENGTH, AT_ONCE = 3, 32, 768, 128
TEXT = ROOT.parent / "shared" / "data" / "text" / "tinyshakespeare.txt"


def measure(only: str = "") -> Iterator[Row]:
    """`only`: perplexity, speed, or memory."""
    torch.set_num_threads(1)
    try:
        from shoal.runs.converted_models import demo_file

        file = demo_file()
    except ShoalError as missing:
        raise SystemExit(f"needs SmolLM2: {missing}") from None
    if only in ("", "perplexity"):
        yield from of_stories()
        yield from of_smollm(file)
    if only in ("", "speed"):
        yield from beside_llama_cpp(file)
    if only in ("", "memory"):
        yield from memory(file)


def of_stories() -> Iterator[Row]:
    model = our_model()
    ids_BL = written(model)
    plain = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    before = loss(model, ids_BL)
    for weights in ("bf16", "int8", "int4"):
        for name, kind in kinds_of(our_model(), weights, lambda name: None).items():
            shape = PackedShape(kind, *plain[name].shape)
            model.get_parameter(name).data.copy_(torch.cat(list(unpacked(packed(plain[name], kind), shape))))
        yield perplexity(f"stories15M, {weights}", loss(model, ids_BL), before, weights)


@torch.inference_mode()
def written(model: Any) -> Tensor:
    """Texts of the model itself."""
    chance, cache, ids_B1 = torch.Generator().manual_seed(1), model.new_cache(0), torch.ones(16, 1, dtype=torch.long)
    found = [ids_B1]
    for _ in range(240):
        found.append(torch.multinomial(model.next_logits(found[-1], cache).softmax(-1), 1, generator=chance))
    return torch.cat(found, 1)


def of_smollm(file: Path) -> Iterator[Row]:
    before = None
    for weights in ("fp32", "bf16", "int8", "auto"):
        options = [parse_override("training.device=cpu"), parse_override(f"serving.weights={weights}")]
        served = open_served([str(file)], options, lambda text: None)
        ids_BL = torch.tensor(served.encode(TEXT.read_text()[:9000])[: 2 * LENGTH]).view(2, LENGTH)
        found = loss(served.model, ids_BL)
        before = found if before is None else before
        if weights != "fp32":
            yield perplexity(f"SmolLM2-135M, {weights}", found, before, weights)


@torch.inference_mode()
def loss(model: Any, ids_BL: Tensor) -> float:
    """The mean negative log-likelihood of all tokens after the first."""
    losses = []
    for ids_L in ids_BL:
        hidden_LD = model.hidden(ids_L[None])[0, :-1]
        for states_MD, next_M in zip(hidden_LD.split(AT_ONCE), ids_L[1:].split(AT_ONCE), strict=True):
            losses.append(torch.nn.functional.cross_entropy(model.project(states_MD), next_M, reduction="none"))
    return float(torch.cat(losses).mean())


def perplexity(name: str, found: float, before: float, weights: str) -> Row:
    return Row(f"{name} / fp32", math.exp(found), math.exp(before), "perplexity", math.exp(found - before), TARGETS[weights])


def beside_llama_cpp(file: Path) -> Iterator[Row]:
    from shoal.cli.main import main

    with tempfile.TemporaryDirectory() as folder:
        own = Path(folder) / "own.gguf"
        main(["export", str(file), str(own), "--gguf", "q4_0"])
        for kind, one in (("Q4_1", file), ("Q4_0 of our export", own)):
            sides = Ours(Model("SmolLM2-135M", one, TOKENS, 0), one)
            for streams, target in ((1, "≥ 0.9"), (STREAMS, "≥ 1.5")):
                ours = rate(lambda sides=sides, streams=streams: sides.ours(streams))  # type: ignore[misc]
                peer = llama_cpp.run(one, sides.prompts[:streams], TOKENS, 1, ROUNDS, "process_time").tokens_per_second
                yield Row(f"{kind}, {streams} at once / llama.cpp", ours, peer, "tokens per second of a core", ours / peer, target)


def memory(file: Path) -> Iterator[Row]:
    """Eight answers at the end of as many prompts, all with full caches: what weights and caches take, and what the process adds."""
    served = open_served([str(file)], [parse_override("training.device=cpu")], lambda text: None)
    chance, tokens = torch.Generator().manual_seed(5), STREAMS * llama_cpp.LENGTH
    prompts = torch.randint(10, served.model.vocab_size - 10, (STREAMS, llama_cpp.LENGTH - TOKENS), generator=chance).tolist()
    ours = byte_count(served.model) + tokens * cache_token_bytes(served.model)
    with serving(file, 1) as (address, process):
        asking(address, Model(file.stem, file, TOKENS, 0))(prompts)
        peak = 1024 * int(re.findall(r"VmHWM:\s+(\d+)", Path(f"/proc/{process}/status").read_text())[0])
    found = llama_cpp.run(file, prompts, TOKENS, 1, 1)
    theirs = file.stat().st_size + tokens * cache_token_bytes(served.model) // 2  # its caches are in 16 bits, ours in float32
    name = f"{file.stem}, {STREAMS} answers of {llama_cpp.LENGTH} tokens"
    yield Row(f"{name}: weights and caches / llama.cpp", ours / 1e6, theirs / 1e6, "MB", ours / theirs, "≤ 1.3")
    beside = (peak - ours) / 1e6, (found.peak_bytes - theirs) / 1e6
    yield Row(f"{name}: what the process adds", *beside, "MB", beside[0] / beside[1], "≤ 300 MB")


def rate(write: Callable[[], list[list[int]]]) -> float:
    """The median of some rounds, after a first one that does not count."""
    rates = []
    for _ in range(1 + ROUNDS):
        start = time.process_time()
        count = sum(map(len, write()))
        rates.append(count / (time.process_time() - start))
    return statistics.median(rates[1:])
