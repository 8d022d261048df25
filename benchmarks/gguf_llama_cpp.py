"""A model as `shoal export --gguf` writes it, in llama.cpp and in Shoal: do both write the same greedy tokens?

`python benchmarks/gguf_llama_cpp.py MODEL` takes a run, or a folder of Hugging Face or PEFT. llama.cpp answers prompts in several slots at
once, without flash attention and with float32 caches, since the alternatives round more. Shoal computes in float32 with the weights as the
file has them. Its own text need not be written: as long as both texts agree they are the same, so one pass over the text of llama.cpp shows
the first token that Shoal would choose otherwise, and how much better it finds its own choice. Neither side may write a token that ends a
text, so every text has the full length. Below a gap of 0.01 in log-probability a different token is a near tie.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from peers import figures
from torch import Tensor

from shoal.errors import ShoalError
from shoal.runs.export.folder import export_gguf
from shoal.serve.load_model import ServedModel, open_served

NEAR_TIE = 0.01
SLOTS = 10
ROUNDED = {"f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16}
THINGS = ["the moon", "bread", "a bridge", "honey", "the violin", "snow", "a library", "iron", "the heart", "a river"]
QUESTIONS = [
    "What is {}?",
    "Write a short story about {}.",
    "Why do people care about {}?",
    "Give me three facts about {}.",
    "Explain {} to a child.",
]
ANSWERS = """
import json, os, sys, urllib.request
from concurrent.futures import ThreadPoolExecutor
import xllamacpp

asked = json.load(open(sys.argv[1]))
out = os.fdopen(os.dup(1), "w")
os.dup2(2, 1)  # the library writes to standard output
params = xllamacpp.CommonParams()
params.model.path, params.n_parallel, params.port = asked["file"], asked["slots"], 0
params.n_ctx = asked["slots"] * asked["context"]
params.cpuparams.n_threads = params.cpuparams_batch.n_threads = asked["threads"]
params.flash_attn_type = xllamacpp.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED
params.cache_type_k = params.cache_type_v = xllamacpp.ggml_type.GGML_TYPE_F32
params.warmup, params.verbosity = False, -1
server = xllamacpp.Server(params)

def answer(prompt):
    body = {"prompt": prompt, "n_predict": asked["tokens"], "temperature": 0, "top_k": 1, "return_tokens": True, "cache_prompt": False}
    body |= {"ignore_eos": True, "logit_bias": [[token, False] for token in asked["never"]]}
    address, headers = server.listening_address + "/completion", {"Content-Type": "application/json"}
    request = urllib.request.Request(address, json.dumps(body).encode(), headers)
    return json.load(urllib.request.urlopen(request))["tokens"]

with ThreadPoolExecutor(asked["slots"]) as pool:
    print(json.dumps(list(pool.map(answer, asked["prompts"]))), file=out, flush=True)
os._exit(0)  # its threads do not end by themselves
"""


class Comparison(NamedTuple):
    """What llama.cpp wrote after a prompt, beside what Shoal would have written."""

    same: int
    """Tokens until the first difference."""
    gap: float
    """How much better, in log-probability, Shoal finds its own token there; 0: there is no difference."""

    @property
    def verdict(self) -> str:
        return "identical" if not self.gap else "near tie" if self.gap < NEAR_TIE else "different"


def prompts_for(served: ServedModel, count: int) -> list[list[int]]:
    """Questions, as the model's conversations are written."""
    questions = [question.format(thing) for question in QUESTIONS for thing in THINGS][:count]
    texts = [served.template.prompt([{"role": "user", "content": question}]) for question in questions]
    return [served.tokenizer.encode(text) for text in texts]


def ends_of(served: ServedModel) -> list[int]:
    """The ids that end a text for either side: llama.cpp also takes these names for an end."""
    names = ["<|im_end|>", "<|endoftext|>", "<|eot_id|>", "<|end_of_text|>", "<end_of_turn>", "<|end|>", "</s>"]
    coded = [served.tokenizer.encode(name) for name in names]
    return sorted({*served.eos_ids, *(ids[0] for ids in coded if len(ids) == 1)})


def round_matrices(model: torch.nn.Module, kind: str) -> None:
    """Give the model's matrices the values that the file has."""
    for parameter in model.parameters():
        if parameter.dim() > 1:
            parameter.data = parameter.data.to(ROUNDED[kind]).to(torch.float32)


@torch.inference_mode()
def compare(model: Any, prompt: Sequence[int], written: Sequence[int], never: Sequence[int]) -> Comparison:
    """`model` gives logits."""
    logits_TV: Tensor = model(torch.tensor([[*prompt, *written]]))[0, len(prompt) - 1 : -1].double()
    logprobs_TV = logits_TV.log_softmax(-1)
    logprobs_TV[:, list(never)] = -torch.inf
    best_T, chosen_T = logprobs_TV.amax(1), logprobs_TV.gather(1, torch.tensor(written)[:, None])[:, 0]
    differs = (best_T > chosen_T).nonzero()
    if not len(differs):
        return Comparison(len(written), 0.0)
    first = int(differs[0])
    return Comparison(first, float(best_T[first] - chosen_T[first]))


def measure(model: str, kind: str, count: int, tokens: int, threads: int) -> list[Comparison]:
    def note(text: str) -> None:
        print(f"note: {text}", file=sys.stderr)

    served = open_served([model], [], note)
    prompts, never = prompts_for(served, count), ends_of(served)
    with tempfile.TemporaryDirectory() as folder:
        file, job = Path(folder) / "model.gguf", Path(folder) / "job.json"
        export_gguf(model, file, kind, note, adapters=False)
        asked = {"file": str(file), "prompts": prompts, "never": never, "tokens": tokens, "slots": min(SLOTS, count)}
        context = -(-(max(map(len, prompts)) + tokens + 1) // 256) * 256
        job.write_text(json.dumps(asked | {"context": context, "threads": threads}))
        texts = figures("llama.cpp", ANSWERS, str(job))
    round_matrices(served.model, kind)
    return [compare(served.model, prompt, written, never) for prompt, written in zip(prompts, texts, strict=True)]


def main() -> None:
    parser = argparse.ArgumentParser(description="Compare the greedy tokens of llama.cpp and of Shoal.")
    parser.add_argument("model", help="a run, or a folder of Hugging Face or PEFT")
    parser.add_argument("--gguf", choices=ROUNDED, default="f16", help="type of the matrices (default: f16)")
    parser.add_argument("--prompts", type=int, default=50, help=f"at most {len(QUESTIONS) * len(THINGS)} (default: 50)")
    parser.add_argument("--tokens", type=int, default=64, help="per prompt (default: 64)")
    parser.add_argument(
        "--threads", type=int, default=os.cpu_count(), help="of either side; 1 on a machine that is busy (default: %(default)s)"
    )
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    try:
        found = measure(arguments.model, arguments.gguf, arguments.prompts, arguments.tokens, arguments.threads)
    except ShoalError as error:
        raise SystemExit(str(error)) from None
    for number, one in enumerate(found, 1):
        if one.gap:
            print(f"prompt {number}: {one.verdict}, {one.same} tokens are the same, then Shoal's is better by {one.gap:.4f}")
    counts = {verdict: sum(one.verdict == verdict for one in found) for verdict in ("identical", "near tie", "different")}
    print(f"{arguments.gguf}, {len(found)} prompts, {arguments.tokens} tokens each: " + ", ".join(f"{n} {v}" for v, n in counts.items()))


if __name__ == "__main__":
    main()
