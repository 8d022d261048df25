"""llama.cpp on the same prompts, in an environment of its own: greedy texts without an end, as many at once as there are prompts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Literal

from peers import figures

SCRIPT = """
import json, os, statistics, sys, threading, time
import xllamacpp

asked = json.loads(sys.argv[1])
params = xllamacpp.CommonParams()
params.model.path, params.n_parallel, params.n_ctx = asked["file"], len(asked["prompts"]), 512 * len(asked["prompts"])
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
print(json.dumps(statistics.median(rates[1:])), flush=True)
os._exit(0)  # its threads do not end by themselves
"""


def tokens_per_second(
    file: Path,
    prompts: list[list[int]],
    tokens: int,
    threads: int,
    rounds: int,
    clock: Literal["perf_counter", "process_time"] = "perf_counter",
) -> float:
    """The median of some rounds, after a first one that does not count. `clock`: of the module time."""
    asked = {"file": str(file), "prompts": prompts, "tokens": tokens, "threads": threads, "rounds": rounds, "clock": clock}
    return float(figures("llama.cpp", SCRIPT, json.dumps(asked)))
