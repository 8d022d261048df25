"""llama.cpp on the same prompts, in an environment of its own: greedy texts without an end, as many at once as there are prompts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Literal, NamedTuple

from peers import figures

LENGTH = 512
"""Tokens for which each answer has a cache."""

SCRIPT = """
import json, os, resource, statistics, sys, threading, time
import xllamacpp

asked = json.loads(sys.argv[1])
params = xllamacpp.CommonParams()
params.model.path, params.n_parallel, params.n_ctx = asked["file"], len(asked["prompts"]), asked["length"] * len(asked["prompts"])
params.cpuparams.n_threads = params.cpuparams_batch.n_threads = asked["threads"]
server, rates, clock = xllamacpp.Server(params), [], getattr(time, asked["clock"])


def one(prompt, counts):
    body = {"prompt": prompt, "max_tokens": asked["tokens"], "temperature": 0, "ignore_eos": True, "cache_prompt": False}
    answer = server.handle_completions(body)
    answer = answer if isinstance(answer, dict) else json.loads(answer)
    counts.append(answer["usage"]["completion_tokens"])


for _ in range(1 + asked["rounds"]):
    start, counts = clock(), []
    threads = [threading.Thread(target=one, args=(prompt, counts)) for prompt in asked["prompts"]]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    rates.append(sum(counts) / (clock() - start))
peak = 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
print(json.dumps({"tokens_per_second": statistics.median(rates[1:]), "peak_bytes": peak}), flush=True)
os._exit(0)  # its threads do not end by themselves
"""


class Found(NamedTuple):
    """`tokens_per_second`: the median of some rounds, after a first one that does not count. `peak_bytes`: of the process."""

    tokens_per_second: float
    peak_bytes: int


def run(
    file: Path,
    prompts: list[list[int]],
    tokens: int,
    threads: int,
    rounds: int,
    clock: Literal["perf_counter", "process_time"] = "perf_counter",
) -> Found:
    """`clock`: of the module time."""
    asked = {"file": str(file), "prompts": prompts, "tokens": tokens, "threads": threads, "rounds": rounds, "clock": clock}
    asked["length"] = LENGTH
    return Found(**figures("llama.cpp", SCRIPT, json.dumps(asked)))
