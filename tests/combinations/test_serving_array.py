"""Every pair of ways to serve a model occurs in a row, and every row writes the tokens of one plain machine.

bf16 is in no row: on some processors its rounding depends on how many answers are computed at the same time.
"""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

pytest.importorskip("fastapi", reason="serving needs fastapi: pip install 'shoal[serve]'")
pytest.importorskip("llguidance", reason="answers by a grammar need llguidance: pip install 'shoal[serve]'")
pytest.importorskip("transformers", reason="two of the models need transformers: pip install 'shoal[hf]'")

from llguidance import LLMatcher

from shoal.data.text.tokenizers.own import CharacterTokenizer
from shoal.models.generation.decoding import LogitPenalties, Warp
from shoal.models.packed import layers
from shoal.models.packed.model import PackedModel, kinds_of
from shoal.serve.backend import LocalBackend
from shoal.serve.batching.backend_interface import Backend
from shoal.serve.batching.batching_engine import BatchingEngine
from shoal.serve.batching.generation_job import GenerationJob
from shoal.serve.constraints import GrammarCompiler
from shoal.serve.nodes.model_description import model_maker
from shoal.serve.nodes.placement import SERVER_NODE
from shoal.serve.nodes.weights import PackedStore
from shoal.serve.paged_backend import PagedBackend
from shoal.serve.speculation import Speculation
from tests.serve.conftest import patient_node_server
from tests.serve.test_nodes import VOCABULARY, Heard, finish, job, make, split_evenly, spread
from tests.serve.test_packed_serving import opened, saved_folder

__all__ = ["patient_node_server"]
pytestmark = pytest.mark.whole

Row = Mapping[str, str]
FACTORS: Mapping[str, tuple[str, ...]] = {
    "model": ("gpt", "switch", "llama", "gemma2"),
    "weights": ("fp32", "int8", "int4"),
    "place": ("here", "pages", "machines", "machine lost"),
    "proposed": ("none", "some"),
    "decoding": ("greedy", "sampled", "penalties", "probabilities"),
    "grammar": ("none", "regex", "schema"),
    "beside": ("alone", "others"),
    "prefix": ("none", "kept"),
}
"""gpt and switch are Shoal's own; Shoal's layers compute llama, and transformers computes gemma2."""
PROMPT, TOKENS = [*[3, 1, 4] * 7, 3, 1], 30
DECODING: Mapping[str, Mapping[str, Any]] = {
    "greedy": {"warp": Warp(0.0)},
    "sampled": {"warp": Warp(1.2, top_p=0.8)},
    "penalties": {"warp": Warp(0.8, top_k=7), "penalties": LogitPenalties(1.3, 0.4, 0.2, {3: 2.0})},
    "probabilities": {"warp": Warp(1.0), "top_logprobs": 3},
}
COMPILER = GrammarCompiler(CharacterTokenizer('{}[]":,.-+ 0123456789abcdefglnorstuxyzkE'), (), VOCABULARY)
GRAMMARS = {
    "regex": LLMatcher.grammar_from_regex("(abab|ab|cd){5,40}x"),
    "schema": LLMatcher.grammar_from_json_schema(
        json.dumps({"type": "array", "items": {"enum": ["redred", "reded", 7]}, "minItems": 9}), overrides={"whitespace_flexible": False}
    ),
}


class Listener(Heard):
    """Also hears the probabilities."""

    def __init__(self) -> None:
        super().__init__()
        self.logprobs: list[float] = []
        self.likely: list[list[int]] = []

    def __call__(self, heard: Any) -> bool:
        if getattr(heard, "logprob", None) is not None:
            self.logprobs.append(heard.logprob)
            self.likely.append([one.token for one in heard.others])
        return super().__call__(heard)


def can_be(row: Row) -> bool:
    """Whether the values go together: others are refused, or the command never chooses them."""
    if row["model"] == "switch" and row["weights"] != "fp32":
        return False
    if row["model"] == "gemma2" and (row["place"] == "pages" or (row["place"] != "here" and row["weights"] != "fp32")):
        return False
    return row["place"] != "pages" or (row["weights"] == "fp32" and row["proposed"] == "none")


def pairs_of(row: Row) -> set[tuple[str, str, str, str]]:
    return {(one, row[one], other, row[other]) for one, other in itertools.combinations(FACTORS, 2)}


def covering_rows() -> list[Row]:
    """Rows that hold every pair of values which can be together: each the one of some random rows that adds the most pairs."""
    chance, rows = random.Random(4), list[Row]()
    all_rows = [dict(zip(FACTORS, values, strict=True)) for values in itertools.product(*FACTORS.values())]
    possible = [row for row in all_rows if can_be(row)]
    missing = set().union(*map(pairs_of, possible))
    while missing:
        best = max(chance.sample(possible, 300), key=lambda row: len(pairs_of(row) & missing))
        rows += [best] if pairs_of(best) & missing else []
        missing -= pairs_of(best)
    return rows


class Held(NamedTuple):
    """A model as a server holds it: whole, and what machines need for their layers."""

    whole: Any
    described: dict[str, Any]
    given: dict[str, Any]


@pytest.fixture(scope="module")
def hold(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, str], Held]:
    folder: Path = tmp_path_factory.mktemp("models")

    @cache
    def held(kind: str, weights: str) -> Held:
        if kind in ("gpt", "switch"):
            model, described = make(kind)
            if weights == "fp32":
                return Held(model, described, {})
            kinds = kinds_of(model, weights, lambda name: None)
            packed = PackedModel(model_maker(described, model.get_parameter, torch.device("cpu"))[0], model.get_parameter, kinds)
            return Held(
                packed.load(torch.device("cpu")), described | {"weights": kinds}, {"packed": packed, "tensors": PackedStore(packed)}
            )
        if not (folder / kind).exists():
            saved_folder(folder / kind, kind, torch.float32)
        whole = opened(folder / kind, weights)
        over = opened(folder / kind, weights, 2) if kind == "llama" or weights == "fp32" else whole
        given = ("model", "packed", "tensors", "gpt_conversion", "run")
        return Held(whole.model, over.described, {name: getattr(over, name) for name in given})

    return held


def asked(row: Row, listener: Listener, tokens: int = TOKENS) -> GenerationJob:
    one = job(PROMPT, listener, tokens)
    for name, value in DECODING[row["decoding"]].items():
        setattr(one, name, value)
    if row["grammar"] != "none":
        one.constraint = COMPILER.compile(GRAMMARS[row["grammar"]])
    return one


def engine(backend: Backend, row: Row) -> BatchingEngine:
    speculation = Speculation(4) if row["proposed"] == "some" else None
    kept, clock = 100 if row["prefix"] == "kept" else 0, itertools.count().__next__
    return BatchingEngine(backend, most_running=4, most_waiting=9, clock=clock, kept_tokens=kept, speculation=speculation)


@contextmanager
def served(row: Row, held: Held) -> Iterator[tuple[BatchingEngine, Callable[[Listener], None]]]:
    """The engine, and what happens after each of its steps."""
    if row["place"] in ("here", "pages"):
        backend = LocalBackend(held.whole) if row["place"] == "here" else PagedBackend(held.whole, most_running=4, kept_tokens=100)
        yield engine(backend, row), lambda listener: None
        return
    model = held.given.get("model", held.whole)
    with spread(model, held.described, ["pi1"], served=held.given) as (one, machines):
        split_evenly(one, 2)
        lost = next(stage.name for stage in one.backend.placement.current.stages if stage.name != SERVER_NODE)

        def pull(listener: Listener) -> None:
            if row["place"] == "machine lost" and lost in machines.running and len(listener.tokens) >= 6:
                machines.unplug(lost, one.backend.node_server)

        yield engine(one.backend, row), pull
        assert (lost in machines.running) == (row["place"] == "machines")


def written(row: Row, held: Held) -> tuple[Listener, BatchingEngine]:
    with served(row, held) as (one, after_each_step):
        if row["prefix"] == "kept":
            one.submit(job(PROMPT, Listener(), 2))
            finish(one)
        if row["beside"] == "others":
            for number, (decoding, grammar) in enumerate((("sampled", "schema"), ("greedy", "none"), ("probabilities", "regex"))):
                other = asked({"decoding": decoding, "grammar": grammar}, Listener(), 20 + 5 * number)
                other.prompt_ids = [number, *PROMPT]
                one.submit(other)
            one.step()
        listener = Listener()
        one.submit(asked(row, listener))
        finish(one, lambda: after_each_step(listener))
    return listener, one


PLAIN = {"place": "here", "proposed": "none", "beside": "alone", "prefix": "none"}
ROWS = covering_rows()


@pytest.mark.parametrize("row", [pytest.param(row, id="-".join(row.values())) for row in ROWS])
def test_every_way_to_serve_writes_the_tokens_of_one_plain_machine(
    row: Row, hold: Callable[[str, str], Held], monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory
) -> None:
    monkeypatch.setattr(layers, "SMALL", 0)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path_factory.getbasetemp()))
    held = hold(row["model"], row["weights"])
    expected, (found, one) = written({**row, **PLAIN}, held)[0], written(row, held)
    assert (found.tokens, found.end) == (expected.tokens, expected.end)
    assert found.likely == expected.likely
    assert found.logprobs == pytest.approx(expected.logprobs, abs=1e-4)
    assert len(found.logprobs) == (len(found.tokens) if row["decoding"] == "probabilities" else 0)
    assert one.tokens_reused > 0 or row["prefix"] == "none" or row["model"] == "gemma2", "caches of a window have no beginning to share"
    if row["proposed"] == "some" and row["grammar"] != "none" and one.scheduler.speculation is not None:
        assert one.tokens_accepted > 0
