"""llama.cpp as an oracle: a process that loads GGUF files one after the other, and answers with ids and log-probabilities."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

_PROGRAM = """
import json, os, sys, threading, urllib.request
import xllamacpp

def asked(server, path, body):
    request = urllib.request.Request(server.listening_address + path, json.dumps(body).encode(), {"Content-Type": "application/json"})
    return json.load(urllib.request.urlopen(request))

def answer(job):
    params = xllamacpp.CommonParams()
    params.model.path, params.n_ctx, params.n_parallel, params.port = job["file"], job["context"], 1, 0
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = 1
    params.flash_attn_type = xllamacpp.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED  # it rounds to half precision
    params.warmup, params.verbosity = False, -1
    params.cache_type_k = params.cache_type_v = xllamacpp.ggml_type.GGML_TYPE_F32
    if job["adapter"]:
        info = xllamacpp.CommonAdapterLoraInfo()
        info.path, info.scale = job["adapter"], 1.0
        params.lora_adapters = [info]
    server = xllamacpp.Server(params)
    common = {"n_predict": job["count"], "temperature": 0, "top_k": 1, "return_tokens": True, "n_probs": 2, "ignore_eos": True}
    common |= {"cache_prompt": False}
    asking = {"add_special": job["special"], "parse_special": True}
    texts = [asked(server, "/tokenize", {"content": text, **asking})["tokens"] for text in job["texts"]]
    found = [asked(server, "/completion", {"prompt": ids, **common}) for ids in job["prompts"]]
    chat = asked(server, "/apply-template", {"messages": job["chat"]})["prompt"] if job["chat"] else None
    kept.append(server)  # its threads do not end by themselves
    words = [{"tokens": one["tokens"], "logprobs": [step["logprob"] for step in one["completion_probabilities"]]} for one in found]
    return {"texts": texts, "answers": words, "chat": chat}

kept, out = [], os.fdopen(os.dup(1), "w")
os.dup2(2, 1)  # the library writes to standard output
for line in sys.stdin:
    try:
        reply = answer(json.loads(line))
    except Exception as error:
        reply = {"error": f"{type(error).__name__}: {error}"}
    print(json.dumps(reply), file=out, flush=True)
os._exit(0)
"""


class Answer(NamedTuple):
    """The ids that llama.cpp chose greedily after a prompt, and their log-probabilities."""

    tokens: list[int]
    logprobs: list[float]


class LlamaCppAnswers(NamedTuple):
    texts: list[list[int]]
    """The ids of the texts."""
    answers: list[Answer]
    chat: str | None
    """The conversation as a prompt."""


class LlamaCpp:
    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process

    def ask(
        self,
        file: Path,
        *,
        texts: Sequence[str] = (),
        prompts: Sequence[Sequence[int]] = (),
        count: int = 16,
        context: int = 128,
        special: bool = False,
        chat: Sequence[dict[str, str]] = (),
        adapter: Path | None = None,
    ) -> LlamaCppAnswers:
        job = {"file": str(file), "texts": list(texts), "prompts": [list(map(int, ids)) for ids in prompts], "count": count}
        job |= {"context": context, "special": special, "chat": list(chat), "adapter": None if adapter is None else str(adapter)}
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(job) + "\n")
        self._process.stdin.flush()
        reply: dict[str, Any] = json.loads(self._process.stdout.readline() or '{"error": "llama.cpp ended"}')
        assert "error" not in reply, reply["error"]
        return LlamaCppAnswers(reply["texts"], [Answer(**one) for one in reply["answers"]], reply["chat"])


@contextmanager
def llama_cpp() -> Iterator[LlamaCpp]:
    """A process of llama.cpp. It ends with its standard input."""
    with subprocess.Popen([sys.executable, "-c", _PROGRAM], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        try:
            yield LlamaCpp(process)
        finally:
            process.kill()


@torch.inference_mode()
def worst_choice(model: Any, prompt: Sequence[int], answer: Answer) -> tuple[float, float]:
    """The largest gap, in log-probability of this model, between its best id and the id that was chosen after the same ids; and the largest
    difference of the chosen ids' log-probabilities. `model` gives logits."""
    ids_BL = torch.tensor([[*prompt, *answer.tokens]])
    found: Tensor = model(ids_BL).double().log_softmax(-1)[0, len(prompt) - 1 : -1]
    chosen = found.gather(1, torch.tensor(answer.tokens)[:, None])[:, 0]
    return float((found.amax(1) - chosen).max()), float((chosen - torch.tensor(answer.logprobs, dtype=torch.double)).abs().max())
