"""Fine-tuning on conversations beside TRL's SFTTrainer, on this machine's processor: CPU-seconds a step, and peak memory.

A random Llama of 26M parameters with GPT-2's vocabulary learns the assistant's turns of conversations of 20 to 500 tokens. Rows are
padded to the longest of a batch of eight, or packed into rows of 512 tokens, four a step; all weights are trained, or LoRA's of rank 8.
Both sides read the same file with the same template, take the same steps, and run in processes of their own, on one thread.
CPU-seconds are those of a process between its third and its last step, divided by the tokens of the conversations in these steps, so
that padding costs time and counts as nothing. TRL packs by its default strategy, which keeps conversations apart by their positions, and
computes its default loss, `chunked_nll`. Memory is the peak of the whole process; Shoal's has the export of the model at the end, TRL
writes none.
`python benchmarks/finetune.py` prints the table; results/peers/trl is made first.
"""

from __future__ import annotations

import json
import random
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from peers import figures, python
from run import Row

ROWS, LENGTH, STEPS, ROUNDS, THREADS = 400, 512, 14, 3, 1
SHAPE = {"hidden_size": 384, "num_hidden_layers": 4, "num_attention_heads": 6, "num_key_value_heads": 2, "intermediate_size": 1024}
TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' }}{% if message['role'] == 'assistant' %}{% generation %}"
    "{{ message['content'] + '<|im_end|>' }}{% endgeneration %}{{ '\n' }}{% else %}{{ message['content'] + '<|im_end|>\n' }}{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
DATA = Path(__file__).parents[2] / "shared" / "data"

TRL = """
import json, os, resource, sys, time
asked = json.loads(sys.argv[1])
import torch
torch.set_num_threads(asked["threads"])
from datasets import load_dataset
from peft import LoraConfig
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import SFTConfig, SFTTrainer

marks, tokens = [], []
class Clock(TrainerCallback):
    def on_step_end(self, args, state, control, **kwargs):
        marks.append(time.process_time())
class Counting(SFTTrainer):
    def training_step(self, model, inputs, *rest):
        tokens.append(int(inputs["attention_mask"].sum() if "attention_mask" in inputs else inputs["input_ids"].numel()))
        return super().training_step(model, inputs, *rest)
settings = SFTConfig(output_dir=asked["out"], max_steps=asked["steps"], per_device_train_batch_size=asked["batch"],
    max_length=asked["length"],
    packing=asked["packed"], assistant_only_loss=True, learning_rate=1e-4, lr_scheduler_type="constant", logging_strategy="no",
    report_to=[],
    save_strategy="no", use_cpu=True, bf16=False, gradient_checkpointing=False, seed=0, disable_tqdm=True, max_grad_norm=1.0)
lora = LoraConfig(r=8, lora_alpha=16, lora_dropout=0.0, target_modules=["q_proj", "v_proj"]) if asked["lora"] else None
model = AutoModelForCausalLM.from_pretrained(asked["model"], dtype=torch.float32)
trainer = Counting(model=model, args=settings, train_dataset=load_dataset("json", data_files=asked["data"], split="train"),
    processing_class=AutoTokenizer.from_pretrained(asked["model"]), peft_config=lora, callbacks=[Clock()])
trainer.train()
peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
print(json.dumps({"seconds": marks[-1] - marks[1], "tokens": sum(tokens[2:]), "peak": peak}))
"""

HIDE = """
import sys
from importlib.machinery import PathFinder
class WithoutUnused(PathFinder):
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        return None if name.partition(".")[0] in ("torchao", "deepspeed") else super().find_spec(name, path, target)
sys.meta_path[:] = [WithoutUnused if one is PathFinder else one for one in sys.meta_path]
"""
"""The environments of the others lack these packages. transformers imports them where they are installed, though nothing here uses them."""

SHOAL = (
    HIDE
    + """
import json, resource, sys, time
asked = json.loads(sys.argv[1])
import torch
torch.set_num_threads(asked["threads"])
import shoal

marks, samples, tokens = [], [], []
class Clock(shoal.Reporter):
    def start(self, recorder):
        engine, step = recorder.engine, recorder.engine.step
        def counted(batches):
            for batch in batches:
                real = batch["document_lengths"].sum() if "document_lengths" in batch else batch["attention_mask"].sum()
                tokens.append(int(real))
            return step(batches)
        engine.step = counted
    def step(self, recorder):
        marks.append(time.process_time())
lora = {"lora": {"rank": 8, "target_modules": ["q_proj", "v_proj"]}} if asked["lora"] else {}
settings = {
    "dialect": "shoal",
    "model": {"kind": "huggingface", "pretrained": asked["model"]} | lora,
    "data": {"source": {"kind": "text", "path": asked["data"]}, "sequence_length": asked["length"],
        "batching": "packed" if asked["packed"] else "dynamic"},
    "training": {"batch_size": asked["batch"], "max_steps": asked["steps"], "device": "cpu",
        "optimizer": {"name": "AdamW", "learning_rate": 1e-4}, "clipping": {"max_norm": 1.0}},
    "evaluation": {"strategy": "never"}, "checkpoint": {"strategy": "never"}, "logging": {"every_steps": 100},
}
shoal.train(settings, run_dir=asked["out"], reporters=[Clock()])
peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
print(json.dumps({"seconds": marks[-1] - marks[1], "tokens": sum(tokens[2:]), "peak": peak}))
"""
)


class Cell(NamedTuple):
    name: str
    packed: bool
    lora: bool
    goal: str


CELLS = (
    Cell("mixed lengths, all weights", False, False, "≥ 1.3"),
    Cell("mixed lengths, LoRA", False, True, "≥ 1.3"),
    Cell("packed, all weights", True, False, "≥ 1.0"),
    Cell("packed, LoRA", True, True, "≥ 1.0"),
)


def make_tokenizer(folder: Path) -> Any:
    """GPT-2's tokenizer with a template of ChatML, written to the folder of a model."""
    from transformers import GPT2TokenizerFast

    source = DATA / "gpt2_tokenizer"
    tokenizer = GPT2TokenizerFast(vocab=str(source / "vocab.json"), merges=str(source / "merges.txt"))
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_start|>", "<|im_end|>"], "eos_token": "<|im_end|>"})
    tokenizer.pad_token, tokenizer.chat_template = "<|endoftext|>", TEMPLATE
    tokenizer.save_pretrained(folder)
    return tokenizer


def make_model(folder: Path) -> None:
    """A random Llama with that tokenizer."""
    from transformers import LlamaConfig, LlamaForCausalLM

    tokenizer = make_tokenizer(folder)
    ids = {"bos_token_id": None, "eos_token_id": tokenizer.eos_token_id, "pad_token_id": None}
    LlamaForCausalLM(
        LlamaConfig(vocab_size=len(tokenizer), tie_word_embeddings=True, max_position_embeddings=1024, **SHAPE, **ids)
    ).save_pretrained(folder)


def make_data(file: Path) -> None:
    """Conversations of random length, of the words of Shakespeare."""
    words = (DATA / "text" / "tinyshakespeare.txt").read_text().split()
    draw, lines = random.Random(0), []
    for _ in range(ROWS):
        turns, messages = draw.randint(1, 3), []
        for _ in range(turns):
            for role, most in (("user", 40), ("assistant", 110)):
                start = draw.randrange(len(words) - most)
                messages.append({"role": role, "content": " ".join(words[start : start + draw.randint(5, most)])})
        lines.append(json.dumps({"messages": messages}))
    file.write_text("\n".join(lines) + "\n")


def taken(side: str, cell: Cell, place: Path) -> dict[str, Any]:
    asked = {
        "model": str(place / "model"),
        "data": str(place / "rows.jsonl"),
        "out": tempfile.mkdtemp(dir=place) + "/run",
        "threads": THREADS,
    }
    asked |= {"steps": STEPS, "batch": 4 if cell.packed else 8, "length": LENGTH, "packed": cell.packed, "lora": cell.lora}
    if side == "peer":
        found: dict[str, Any] = figures("trl", TRL, json.dumps(asked))
        return found
    done = subprocess.run([sys.executable, "-c", SHOAL, json.dumps(asked)], capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(done.stderr[-2000:])
    last: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return last


def measure() -> Iterator[Row]:
    python("trl")
    with tempfile.TemporaryDirectory() as name:
        place = Path(name)
        make_model(place / "model")
        make_data(place / "rows.jsonl")
        for cell in CELLS:
            found: dict[str, list[dict[str, Any]]] = {"ours": [], "peer": []}
            for _ in range(ROUNDS):
                for side, runs in found.items():
                    runs.append(taken(side, cell, place))
            cost, memory = (
                {side: statistics.median(of(run) for run in runs) for side, runs in found.items()}
                for of in (lambda run: 1e3 * run["seconds"] / run["tokens"], lambda run: run["peak"])
            )
            tokens = {side: statistics.median(run["tokens"] for run in runs) / (STEPS - 2) for side, runs in found.items()}
            note = f"tokens a step {tokens['ours']:.0f} and {tokens['peer']:.0f}"
            yield Row(
                f"finetune, {cell.name}", cost["ours"], cost["peer"], "CPU s per 1,000 tokens", cost["peer"] / cost["ours"], cell.goal, note
            )
            yield Row(f"finetune, {cell.name}: memory", memory["ours"], memory["peer"], "GiB", memory["ours"] / memory["peer"], "≤ 0.8")


if __name__ == "__main__":
    for row in measure():
        print(row, flush=True)
