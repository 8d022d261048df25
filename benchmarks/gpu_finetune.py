"""Fine-tuning of a Hugging Face Llama on one GPU in bf16: `SingleEngine` beside a plain compiled loop of transformers, and of peft.

258M and 1.1B parameters, all of them trained or LoRA matrices of rank 8 beside weights in bf16; rows of 1,024 tokens: as a stream, and with
four documents in a row that do not attend to each other. The plain loop keeps them apart by position_ids, which transformers turns into a
mask for SDPA. Both have random weights from one folder, fused AdamW in fp32, autocast, the same clipping, torch.compile, and are
interleaved in one run. Operations: six for each weight that multiplies, four for a frozen one, and attention over half of the pairs. The
pause is what `shoal train` as a user starts it takes for an evaluation and a checkpoint beyond the
usual time of a step. `python benchmarks/gpu_finetune.py` prints the table.
"""

from __future__ import annotations

import gc
import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from gpu_step_time import Step, median_seconds
from run import Row
from torch import Tensor

from shoal.config.data_shapes import DataShapes
from shoal.config.load import resolve_data
from shoal.engines import SingleEngine
from shoal.models import build
from shoal.tasks.language import LanguageModelling

LENGTH, VOCABULARY, DOCUMENTS = 1024, 16_000, 4
STEPS, ROUNDS, WARM_UP = 10, 4, 6
LORA: dict[str, Any] = {"rank": 8, "alpha": 16.0}
PEAK = 780e12
"""Measured operations per second of a bf16 product on an H200."""


class Size(NamedTuple):
    name: str
    batch: int
    shape: dict[str, Any]


SIZES = (
    Size("258M", 16, {"hidden_size": 1024, "num_hidden_layers": 20, "num_attention_heads": 16, "intermediate_size": 2816}),
    Size("1.1B", 8, {"hidden_size": 2048, "num_hidden_layers": 16, "num_attention_heads": 32, "intermediate_size": 8192}),
)


def folder_of(size: Size, place: Path) -> str:
    from transformers import LlamaConfig, LlamaForCausalLM

    heads = {"num_key_value_heads": size.shape["num_attention_heads"] // 4}
    none = dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"))
    torch.manual_seed(0)
    config = LlamaConfig(vocab_size=VOCABULARY, max_position_embeddings=LENGTH, **size.shape, **heads, **none)
    with torch.device("cuda"):
        made = LlamaForCausalLM(config)
    made.cpu().save_pretrained(place / size.name)
    return str(place / size.name)


def operations(size: Size, model: torch.nn.Module, pairs: int) -> float:
    """Operations of a step."""
    trained = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
    frozen = sum(parameter.numel() for parameter in model.parameters()) - trained
    looked_up = VOCABULARY * size.shape["hidden_size"]
    products = 6 * trained + 4 * frozen - (4 if frozen else 6) * looked_up
    attention = 4 * size.shape["num_hidden_layers"] * size.shape["hidden_size"] * pairs / 2
    return size.batch * (products * LENGTH + 3 * attention)


def ours(folder: str, batch: dict[str, Tensor], **model: Any) -> tuple[Step, torch.nn.Module]:
    training = {"precision": {"kind": "bf16"}, "compile": True, "optimizer": {"name": "AdamW", "learning_rate": 1e-5}}
    settings = {"model": {"kind": "huggingface", "pretrained": folder, **model}, "training": training, "data": {"sequence_length": LENGTH}}
    run = resolve_data(settings, name="bench", dialect="shoal", environ={}).run
    task = LanguageModelling(build(run, DataShapes(vocab_size=VOCABULARY)))
    engine = SingleEngine(run, task, torch.device("cuda"), 10_000, learns=True)
    batch = {name: value.cpu().pin_memory() for name, value in batch.items()}  # as a feed gives it
    return lambda: engine.step([batch]).metrics["loss"], task.players["model"]


def peer(folder: str, batch: dict[str, Tensor], lora: bool) -> Step:
    from transformers import AutoModelForCausalLM

    kind = torch.bfloat16 if lora else torch.float32
    plain: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=kind, attn_implementation="sdpa").cuda().train()
    if lora:
        import peft

        plain = peft.get_peft_model(plain, peft.LoraConfig(task_type="CAUSAL_LM", r=LORA["rank"], lora_alpha=LORA["alpha"]))
    learned = [parameter for parameter in plain.parameters() if parameter.requires_grad]
    model, optimizer = torch.compile(plain), torch.optim.AdamW(learned, lr=1e-5, fused=True)
    given = {"input_ids": batch["input_ids"], "use_cache": False}
    if "document_lengths" in batch:
        given["position_ids"] = torch.arange(LENGTH // DOCUMENTS, device="cuda").repeat(DOCUMENTS).expand_as(batch["input_ids"])

    def step() -> Tensor:
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast("cuda", dtype=torch.bfloat16):
            logits = model(**given).logits
            loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1).float(), batch["labels"].flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(learned, 1.0)
        optimizer.step()
        return loss.detach()

    return step


def rows_of(size: Size, packed: bool) -> dict[str, Tensor]:
    ids = torch.randint(VOCABULARY, (size.batch, LENGTH + 1), device="cuda")
    batch = {"input_ids": ids[:, :-1].contiguous(), "labels": ids[:, 1:].contiguous()}
    if packed:
        batch["document_lengths"] = torch.full((size.batch, DOCUMENTS), LENGTH // DOCUMENTS, device="cuda")
    return batch


def compared(size: Size, folder: str, packed: bool, lora: bool) -> Row:
    torch.compiler.reset()
    gc.collect()
    torch.cuda.empty_cache()
    batch = rows_of(size, packed)
    own, model = ours(folder, batch, **({"lora": LORA, "load": "bf16"} if lora else {}))
    theirs, losses = peer(folder, batch, lora), []
    for step in (own, theirs):
        losses.append([float(step()) for _ in range(WARM_UP)])
    difference = max(abs(one - other) / other for one, other in zip(*losses, strict=True))
    middle = median_seconds({"ours": own, "peer": theirs}, STEPS, ROUNDS)
    tokens, pairs = size.batch * LENGTH, LENGTH**2 // (DOCUMENTS if packed else 1)
    share = operations(size, model, pairs) / middle["ours"] / PEAK
    note = f"{share:.0%} of 780 TFLOP/s, losses within {difference:.1e}, {torch.cuda.max_memory_allocated() / 2**30:.0f} GiB for both"
    name = f"gpu-finetune Llama {size.name}, {'LoRA' if lora else 'full'}, {'documents' if packed else 'stream'}"
    return Row(name, tokens / middle["ours"], tokens / middle["peer"], "tokens/s", middle["peer"] / middle["ours"], "≥ 1.3", note)


def pause(folder: str, place: Path) -> Row:
    """The longest time between two steps of `shoal train` with an evaluation and a checkpoint every 50 steps, beyond the median."""
    text = place / "text.txt"
    text.write_text("".join(path.read_text(errors="replace") for path in sorted(Path(torch.__file__).parent.glob("*.py"))) * 4)
    settings = [f"model.pretrained={folder}", "model.kind=huggingface", "data.source.kind=text", f"data.source.path={text}"]
    settings += ["data.tokenizer=bytes", f"data.sequence_length={LENGTH}", "data.batching=packed", "training.batch_size=16"]
    settings += ["training.max_steps=200", "training.precision.kind=bf16", "logging.every_steps=1", "training.compile=true"]
    settings += ["evaluation.strategy=steps", "evaluation.every_steps=50", "checkpoint.strategy=steps", "checkpoint.every_steps=50"]
    settings += ["data.max_eval_samples=64"]
    options = [word for one in settings for word in ("--set", one)]
    (place / "bench.yaml").write_text("dialect: shoal\n")
    command = [sys.executable, "-m", "shoal", "train", str(place / "bench.yaml"), "--run-dir", str(place / "run"), *options]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(done.stdout[-2000:] + done.stderr[-2000:])
    records = [json.loads(line) for line in (place / "run" / "metrics.jsonl").read_text().splitlines()]
    steps = {record["step"]: record["wall_s"] for record in records if record["split"] == "train"}
    gaps = {number: steps[number] - steps[number - 1] for number in sorted(steps) if number - 1 in steps}
    usual = statistics.median(gaps.values())
    pauses = [round(gaps[number] - usual, 2) for number in (51, 101, 151) if number in gaps]
    print(f"pauses after steps 50, 100, 150: {pauses} s; a step takes {usual:.3f} s", file=sys.stderr)
    name = f"gpu-finetune pause for an evaluation and a checkpoint, {Path(folder).name}"
    return Row(name, max(pauses), usual, "s", max(pauses), "≤ 1", f"all pauses: {pauses}; peer: a step")


def measure() -> Iterator[Row]:
    torch.set_float32_matmul_precision("high")
    with tempfile.TemporaryDirectory() as name:
        for size in SIZES:
            folder = folder_of(size, Path(name))
            if size is SIZES[0]:
                yield pause(folder, Path(name))
            for lora in (False, True):
                for packed in (False, True):
                    yield compared(size, folder, packed, lora)


if __name__ == "__main__":
    for row in measure():
        print(row, flush=True)
