"""Answers on one GPU: a random Llama of 1.1B in bf16, top-p sampling; tokens/s of the batching engine beside Hugging Face's `generate` with
a static cache (compiled), and beside what the memory allows; then over HTTP.

Engine rows are taken while all answers are written, from the first step in which all have a token to the first end. Prompts have 64 tokens
and answers 384, so contexts are of 256 tokens on the mean. The limit of a context is the time to read the weights and the caches at 4 TB/s.
HTTP rows count all tokens from the first request to the last answer, prompts included, and stand beside the same requests to the engine.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import httpx
import torch
from run import Row

from shoal.models.generation.decoding import TokenDraws, Warp
from shoal.models.generation.paged_decoding import PagedDecoder, StepKind
from shoal.models.huggingface.as_gpt import gpt_conversion
from shoal.models.huggingface.model import HuggingFace
from shoal.serve.batching.batching_engine import BatchingEngine
from shoal.serve.batching.generation_job import GenerationJob, JobEvent
from shoal.serve.paged_backend import PagedBackend

SIZES: dict[str, Any] = {
    "vocab_size": 32_000,
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_hidden_layers": 16,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 8448,
    "eos_token_id": None,
    "bos_token_id": None,
}
PROMPT, ANSWER, LONGEST = 64, 384, 8448
TARGETS = {1: 800, 8: 7000, 64: 40_000, 256: 90_000}
TOP_P, BYTES_PER_S, TOKEN_BYTES = Warp(1.0, top_p=0.9), 4e12, 2 * 16 * 8 * 64 * 2
STREAMS = 64


def prompts(count: int) -> list[list[int]]:
    return torch.randint(10, SIZES["vocab_size"], (count, PROMPT), generator=torch.Generator().manual_seed(5)).tolist()


def measure(only: str = "") -> Iterator[Row]:
    """`only`: engine, peer, contexts, gap or http; else all."""
    if not torch.cuda.is_available():
        print("gpu-serve: skipped, there is no CUDA GPU here")
        return
    from transformers import AutoModelForCausalLM, LlamaConfig

    torch.manual_seed(0)
    torch.set_default_dtype(torch.bfloat16)
    with torch.device("cuda"):
        theirs = AutoModelForCausalLM.from_config(LlamaConfig(**SIZES)).eval().requires_grad_(False)
    torch.set_default_dtype(torch.float32)
    conversion = gpt_conversion(wrapped := HuggingFace(theirs))
    assert conversion is not None
    model = conversion.convert(wrapped.state_dict().__getitem__).cuda()
    parts = {"engine": engine_rows, "contexts": context_rows, "gap": gap_rows, "peer": peer_rows}
    for name, part in parts.items():
        if only in ("", name):
            yield from part(theirs if name == "peer" else model)
    if only in ("", "http"):
        yield from http_rows(theirs, model)


# --- the engine ------------------------------------------------------------------------------------------


def engine(model: Any, requests: int) -> BatchingEngine:
    backend = PagedBackend(model, most_running=requests, kept_tokens=0)
    backend.prepare()
    return BatchingEngine(backend, most_running=requests, most_waiting=requests, clock=time.monotonic)


def jobs(count: int, answer: int = ANSWER, on_event: Any = lambda event: False) -> list[GenerationJob]:
    return [GenerationJob(ids, answer, TokenDraws(3, ids), on_event, TOP_P) for ids in prompts(count)]


def steady(one: BatchingEngine, count: int) -> float:
    """Tokens/s while all answers are written."""
    asked = jobs(count)
    one.submit(*asked)
    while not all(job.written for job in asked):
        one.step()
    begun, start = sum(len(job.written) for job in asked), time.perf_counter()
    while len(one.running) == count:
        one.step()
    rate = (sum(len(job.written) for job in asked) - begun) / (time.perf_counter() - start)
    while one.busy:
        one.step()
    return rate


def engine_rows(model: Any) -> Iterator[Row]:
    for requests, target in TARGETS.items():
        one = engine(model, requests)
        rate = max(steady(one, requests) for _ in range(2))
        yield Row(f"gpu-serve engine, {requests} requests", rate, target, "tokens/s", rate / target, "≥ 1", "against the goal")


def context_rows(model: Any) -> Iterator[Row]:
    """The step alone, at a position that is set."""
    decoder = PagedDecoder(model, rows=STREAMS, longest=LONGEST, tokens=STREAMS * LONGEST)
    weights = sum(one.nbytes for one in model.parameters()) - model.token_embedding.weight.nbytes
    for requests in (8, STREAMS):
        slots = [decoder.open(LONGEST - 64, TOP_P) for _ in range(requests)]
        taken = [slot for slot in slots if slot is not None]
        for context in (2048, 8192):
            decoder.state.lengths_N[1:] = context - 30
            for timed in (False, True):
                torch.cuda.synchronize()
                start = time.perf_counter()
                for _ in range(50 if timed else 3):
                    decoder.step(taken, [0.37] * requests, StepKind())
                torch.cuda.synchronize()
            step_s = (time.perf_counter() - start) / 50
            limit_s = (weights + TOKEN_BYTES * context * requests) / BYTES_PER_S
            name = f"gpu-serve context {context}, {requests} requests"
            yield Row(name, requests / step_s, requests / limit_s, "tokens/s", limit_s / step_s, "≥ 0.6", "against the memory's limit")
        for slot in taken:
            decoder.close(slot)


def gap_rows(model: Any) -> Iterator[Row]:
    """The longest time between two tokens while a prompt of 2,000 tokens is read beside 32 answers."""
    one, came = engine(model, STREAMS), list[float]()

    def hear(event: JobEvent) -> bool:
        came.append(time.perf_counter())
        return False

    first, *rest = jobs(32, 1500)
    first.on_event = hear
    numbers = one.submit(first, *rest)
    while len(came) < 200:
        one.step()
    long = GenerationJob(list(range(10, 2010)), 1, TokenDraws(3, [1]), lambda event: False, TOP_P)
    start = time.perf_counter()
    one.submit(long)
    while not long.written:
        one.step()
    read_s, before = time.perf_counter() - start, 200
    gaps = [later - earlier for earlier, later in pairwise(came)]
    quiet, longest = sorted(gaps[50 : before - 1])[75], max(gaps[before - 1 :])
    one.cancel(numbers)
    while one.busy:
        one.step()
    note = f"the prompt was read in {1000 * read_s:.0f} ms; a chunk takes time, too"
    yield Row("gpu-serve gap beside a prompt of 2,000", 1000 * longest, 1000 * quiet, "ms", longest / quiet, "≤ 2 and a chunk", note)


# --- the peer --------------------------------------------------------------------------------------------


def peer_rows(theirs: Any) -> Iterator[Row]:
    conversion = gpt_conversion(wrapped := HuggingFace(theirs))
    assert conversion is not None
    model = conversion.convert(wrapped.state_dict().__getitem__).cuda()
    for requests in (1, 8, STREAMS):
        ids = torch.tensor(prompts(requests), device="cuda")
        asked = {"do_sample": True, "top_p": 0.9, "top_k": 0, "cache_implementation": "static", "pad_token_id": 0}
        for _ in range(2):
            torch.cuda.synchronize()
            start = time.perf_counter()
            theirs.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=128, min_new_tokens=128, **asked)
            torch.cuda.synchronize()
            peer = 128 * requests / (time.perf_counter() - start)
        rate = steady(engine(model, requests), requests)
        yield Row(f"gpu-serve {requests} requests / HF static cache", rate, peer, "tokens/s", rate / peer, "≥ 1")


# --- HTTP ------------------------------------------------------------------------------------------------


def http_rows(theirs: Any, model: Any) -> Iterator[Row]:
    one = engine(model, STREAMS)
    best = 0.0
    for _ in range(2):
        one.submit(*jobs(STREAMS))
        start = time.perf_counter()
        while one.busy:
            one.step()
        best = max(best, STREAMS * ANSWER / (time.perf_counter() - start))
    del one
    with tempfile.TemporaryDirectory() as folder, serving(theirs, Path(folder)) as address:
        for streams, target in ((False, "≥ 0.8"), (True, "≥ 0.5")):
            command = [sys.executable, __file__, address, json.dumps(streams)]
            rate = float(subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()[-1])
            name = f"gpu-serve HTTP, {STREAMS} requests, {'streamed' if streams else 'whole'}"
            yield Row(name, rate, best, "tokens/s", rate / best, target, "against the engine")


@contextmanager
def serving(theirs: Any, folder: Path) -> Iterator[str]:
    """`shoal serve`; where it answers."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel

    theirs.save_pretrained(folder)
    Tokenizer(WordLevel({f"w{i}": i for i in range(theirs.vocab_size)}, unk_token="w0")).save(str(folder / "tokenizer.json"))
    settings = ["serving.prefix_cache_tokens=0", f"serving.max_running={STREAMS}", f"serving.max_waiting={STREAMS}"]
    command = [sys.executable, "-m", "shoal", "serve", str(folder), "--port", "0"]
    command += [word for setting in settings for word in ("--set", setting)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    assert process.stdout is not None
    try:
        seen = ""
        for line in process.stdout:
            seen += line
            if "answers at http://" in line:
                threading.Thread(target=process.stdout.read, daemon=True).start()
                yield line.split("answers at ")[1].split("/v1")[0]
                return
        raise SystemExit(f"the server did not start:\n{seen}")
    finally:
        process.terminate()
        process.wait()


def ask_over_http(address: str, streams: bool) -> float:
    """Tokens/s of `STREAMS` requests at once, in a process of their own."""
    client = httpx.Client(timeout=300, limits=httpx.Limits(max_connections=STREAMS))
    name = client.get(f"{address}/v1/models").json()["data"][0]["id"]
    counts = [0] * STREAMS

    def one(i: int, ids: list[int]) -> None:
        sampling = {"temperature": 1.0, "top_p": 0.9, "top_k": 0, "stream": streams}
        body = {"model": name, "prompt": ids, "max_tokens": ANSWER, **sampling}
        if streams:
            body["stream_options"] = {"include_usage": True}
            with client.stream("POST", f"{address}/v1/completions", json=body) as response:
                *_, last = (line for line in response.iter_lines() if line.startswith("data: {"))
            counts[i] = json.loads(last[6:])["usage"]["completion_tokens"]
        else:
            counts[i] = client.post(f"{address}/v1/completions", json=body).json()["usage"]["completion_tokens"]

    best = 0.0
    for _ in range(3):
        threads = [threading.Thread(target=one, args=(i, ids)) for i, ids in enumerate(prompts(STREAMS))]
        start = time.perf_counter()
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        best = max(best, sum(counts) / (time.perf_counter() - start))
    return best


if __name__ == "__main__":
    print(ask_over_http(sys.argv[1], json.loads(sys.argv[2])))
