"""Answers that follow a grammar: alone, in batches, with pages, and over machines of which one is lost."""

from __future__ import annotations

import asyncio
import itertools
import json
import random
import re
import threading
from pathlib import Path

import jsonschema
import pytest
import torch

pytest.importorskip("llguidance", reason="answers by a grammar need llguidance: pip install 'shoal[serve]'")

from llguidance import LLMatcher

from shoal.config.schema import model as model_schema
from shoal.data import load_tokenizer
from shoal.data.text.tokenizers.own import ByteTokenizer, CharacterTokenizer
from shoal.models.generation.decoding import LogitPenalties, Warp
from shoal.models.generation.token_masks import _denied_on_gpu, masked, words_for
from shoal.models.gpt import Gpt
from shoal.serve import constraints
from shoal.serve.backend import LocalBackend
from shoal.serve.batching.backend_interface import Backend
from shoal.serve.batching.batching_engine import BatchingEngine
from shoal.serve.constraints import GrammarCompiler, GrammarError, SlowGrammarError, TokenConstraint, check_size
from shoal.serve.nodes.placement import SERVER_NODE
from shoal.serve.paged_backend import PagedBackend
from shoal.serve.speculation import Speculation
from shoal.serve.tool_formats import json_rule
from tests.serve.test_batching import VOCABULARY, Heard, alone, job, make_model
from tests.serve.test_nodes import finish, make, split_evenly, spread
from tests.support.chat_folders import write_tokenizer
from tests.support.json_schemas import random_schema
from tests.support.processes import HANG_S

LETTERS = CharacterTokenizer('{}[]":,.-+ 0123456789abcdefglnorstuxyzkE')
COMPILER = GrammarCompiler(LETTERS, (), VOCABULARY)
SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "integer", "minimum": 0, "maximum": 99999}, "b": {"enum": ["red", "green"]}},
    "required": ["a", "b"],
    "additionalProperties": False,
}


def regex(pattern: str) -> TokenConstraint:
    return COMPILER.compile(LLMatcher.grammar_from_regex(pattern))


def schema(content: dict) -> TokenConstraint:
    return COMPILER.compile(LLMatcher.grammar_from_json_schema(json.dumps(content), overrides={"whitespace_flexible": False}))


def engine(backend: Backend) -> BatchingEngine:
    return BatchingEngine(backend, most_running=4, most_waiting=100, clock=itertools.count().__next__, kept_tokens=100)


def allowed(one: TokenConstraint) -> list[int]:
    words = one.mask().tolist()
    return [32 * word + bit for word, bits in enumerate(words) for bit in range(32) if bits >> bit & 1]


def test_the_alphabet_of_this_file_has_a_letter_for_each_row_of_the_model():
    assert LETTERS.vocab_size == VOCABULARY


@pytest.mark.parametrize("vocabulary", [1, 31, 64, 101])
def test_a_mask_leaves_the_logits_of_allowed_tokens_and_lowers_the_others(vocabulary):
    torch.manual_seed(1)
    words_RW = torch.randint(-(2**31), 2**31, (3, words_for(vocabulary)), dtype=torch.int32)
    logits_RV = torch.randn(3, vocabulary)
    bits = [[words_RW[row, token // 32].item() >> token % 32 & 1 for token in range(vocabulary)] for row in range(3)]
    found_RV = masked(logits_RV, words_RW)
    assert torch.equal(found_RV.where(torch.tensor(bits) == 1, 0), logits_RV.where(torch.tensor(bits) == 1, 0))
    assert torch.equal(found_RV < -1e30, torch.tensor(bits) == 0)
    assert found_RV.isfinite().all()
    assert _denied_on_gpu(words_RW, vocabulary).tolist() == [[1 - bit for bit in row] for row in bits]


def test_a_mask_allows_what_continues_the_grammar_and_an_end_only_where_it_may_end():
    compiler = GrammarCompiler(ByteTokenizer(), (256,), 300)
    one = compiler.compile(LLMatcher.grammar_from_regex("ab+c?"))
    assert allowed(one) == [ord("a")]
    one.advance(ord("a"))
    other = one.copy()
    assert allowed(one) == allowed(other) == [ord("b")]
    assert one.accepted([*b"bbcb"]) == 3
    one.advance(ord("b"))
    assert allowed(one) == [ord("b"), ord("c"), 256]
    one.advance(ord("c"))
    assert one.is_over
    assert not one.has_failed
    other.advance(ord("x"))
    assert other.has_failed


@pytest.mark.parametrize("family", ["qwen25", "llama3", "gemma"])
def test_any_way_through_the_masks_of_a_vocabulary_writes_what_the_schema_allows(family, tmp_path: Path):
    tokenizer, draw = load_tokenizer(str(write_tokenizer(tmp_path, family))), random.Random(2)
    compiler = GrammarCompiler(tokenizer, (tokenizer.eos_id,), tokenizer.vocab_size + 50)
    special = {tokenizer.encode(text)[0] for text in tokenizer.special_tokens.values()}
    for _ in range(5):
        content = random_schema(draw)
        one, ids = compiler.compile(LLMatcher.grammar_from_json_schema(json.dumps(content))), list[int]()
        while not one.is_over and (choices := allowed(one)) and len(ids) < 3000:
            token = tokenizer.eos_id if tokenizer.eos_id in choices else draw.choice(choices)
            assert token == tokenizer.eos_id or token not in special
            if token == tokenizer.eos_id:
                break
            ids.append(token)
            one.advance(token)
        jsonschema.validate(json.loads(tokenizer.decode(ids)), content)


def test_what_cannot_be_followed_is_refused_before_the_model_works():
    with pytest.raises(GrammarError, match="no text of the model's vocabulary"):
        regex("ÄÖÜ")
    with pytest.raises(GrammarError, match="parse error"):
        regex("(a")
    with pytest.raises(GrammarError, match="Unimplemented"):
        schema({"not": {"type": "integer"}})
    with pytest.raises(GrammarError, match="within each other"):
        check_size(json.loads("[" * 70 + "]" * 70))
    with pytest.raises(GrammarError, match="letters"):
        check_size({"enum": ["a" * 200_000]})


def chained_references(count: int) -> str:
    """A schema by which llguidance overflows the stack of its thread, and so would end the server."""
    definitions = {f"a{i}": {"items": {"$ref": f"#/$defs/a{i + 1}"}} for i in range(count)}
    return f"start: %json {json.dumps({'$ref': '#/$defs/a0', '$defs': {**definitions, f'a{count}': {}}})}"


@pytest.mark.parametrize(
    "grammar",
    [
        LLMatcher.grammar_from_regex("((a{1,1000}){1,1000}){1,1000}"),
        LLMatcher.grammar_from_regex("(.*a.{30}){9}"),
        LLMatcher.grammar_from_regex("(" * 30_000 + "a" + ")" * 30_000),
        LLMatcher.grammar_from_lark("start: " + "(" * 30_000 + '"a"' + ")" * 30_000),
        LLMatcher.grammar_from_lark("start: start start | "),
        chained_references(2500),
        "start: T0\n" + "".join(f'T{i}: T{i + 1} "a"?\n' for i in range(2500)) + 'T2500: "a"\n',
        LLMatcher.grammar_from_lark("start: s\ns: s s | /[a-z ]/ | \n"),
        LLMatcher.grammar_from_json_schema(json.dumps({"$ref": "#"})),
        LLMatcher.grammar_from_json_schema(json.dumps({"type": "string", "minLength": 10**9})),
        LLMatcher.grammar_from_json_schema(
            json.dumps({"allOf": [{"anyOf": [{"properties": {f"{i}{j}": {"const": i}}} for j in range(9)]} for i in range(20)]})
        ),
        '{"grammars": [',
        "[]",
    ],
    ids=lambda text: text[:30],
)
def test_hostile_grammars_are_refused_or_followed_and_take_no_long_time(grammar):
    try:
        one = COMPILER.compile(grammar)
    except GrammarError:
        return
    for _ in range(20):
        if one.is_over:
            return
        one.advance((allowed(one) or [0])[0])


def test_a_grammar_that_overflows_the_stack_costs_no_new_process():
    """Starting one takes half a second, in which the grammars of others wait."""
    regex("a")
    before = COMPILER._slow._checker._process
    with pytest.raises(GrammarError, match="takes too much to compile"):
        COMPILER.compile(chained_references(2500))
    assert regex("a").mask().any()
    assert COMPILER._slow._checker._process is before


def test_a_grammar_that_takes_longer_than_it_may_is_ended():
    queue = constraints._CompileQueue(1e-6)
    with pytest.raises(SlowGrammarError, match="more than 1e-06 seconds"):
        queue.check(chained_references(400))
    queue.threads.shutdown()


def test_a_grammar_waits_for_none_that_takes_long(monkeypatch):
    compiler, may_end, check = GrammarCompiler(LETTERS, (), VOCABULARY), threading.Event(), constraints._CompileQueue.check

    def slow(queue, grammar):
        if "slow" not in grammar:
            check(queue, grammar)
        elif queue.seconds < constraints._CHECK_S:
            raise SlowGrammarError("too long")
        else:
            assert may_end.wait(HANG_S)
            raise GrammarError("refused")

    async def ask():
        many = [asyncio.create_task(compiler.compiled(lambda: "slow")) for _ in range(5)]
        try:
            found = await asyncio.wait_for(compiler.compiled(lambda: 'start: "ab"\n'), HANG_S)
            assert not any(one.done() for one in many)
        finally:
            may_end.set()
        assert all(isinstance(one, GrammarError) for one in await asyncio.gather(*many, return_exceptions=True))
        return found

    monkeypatch.setattr(constraints._CompileQueue, "check", slow)
    assert allowed(asyncio.run(ask()))
    compiler.close()


@pytest.mark.parametrize("kind", ["learned", "moe", "lstm"])
def test_other_texts_of_a_batch_stay_as_they_are(kind):
    model, prompts = make_model(kind), [[1, 2, 3], [4], [5, 6, 7, 8], [9, 1]]
    one, heard = engine(LocalBackend(model)), [Heard() for _ in prompts]
    constraints = [None, schema(SCHEMA), None, regex("(ab|ba){2,9}x")]
    for prompt, listener, constraint in zip(prompts, heard, constraints, strict=True):
        one.submit(job(prompt, listener, 50, constraint=constraint))
        one.step()
    finish(one)
    for number in (0, 2):
        assert heard[number].tokens == alone(model, prompts[number], 50)
    jsonschema.validate(json.loads(LETTERS.decode(heard[1].tokens)), SCHEMA)
    assert re.fullmatch("(ab|ba){2,9}x", LETTERS.decode(heard[3].tokens))
    assert [listener.end for listener in heard] == ["length", "stop", "length", "stop"]


def constrained(one: BatchingEngine) -> list[Heard]:
    """What requests write that come one after the other, some by a grammar, with all kinds of decoding."""
    warps = (Warp(1.0), Warp(0.0), Warp(0.8, top_k=7), Warp(1.2, top_p=0.8), Warp(1.0, 9, 0.9, 0.01))
    heard = [Heard() for _ in range(10)]
    for number, listener in enumerate(heard):
        settings = {"penalties": LogitPenalties(1.3, 0.4, 0.2, {3: 2.0})} if number % 4 == 1 else {}
        constraint = (None, schema(SCHEMA), regex("[a-g]{5,20}x"))[number % 3]
        prompt = [7, 8, 9, number, *range(number)]
        one.submit(job(prompt, listener, 30, warp=warps[number % 5], constraint=constraint, top_logprobs=number % 2 or None, **settings))
        one.step()
    finish(one)
    return heard


def test_a_backend_that_chooses_tokens_itself_follows_the_same_grammars():
    model = make_model("rotary")
    expected = constrained(engine(LocalBackend(model)))
    found = constrained(engine(PagedBackend(model, most_running=4, kept_tokens=100)))
    assert [one.tokens for one in found] == [one.tokens for one in expected]
    assert [one.end for one in found] == [one.end for one in expected]
    for one in found[1::3]:
        jsonschema.validate(json.loads(LETTERS.decode(one.tokens)), SCHEMA)


def test_proposed_tokens_go_through_the_same_grammar():
    """A model that repeats itself has tokens proposed; those that its grammar does not allow are not even verified."""
    model, content = make_model("rotary"), {"type": "array", "items": {"enum": ["redredred", "reded"]}, "minItems": 12, "maxItems": 12}
    texts = []
    for speculation in (None, Speculation(5)):
        one, heard = engine(LocalBackend(model)), [Heard() for _ in range(3)]
        one.scheduler.speculation = speculation
        for number, (listener, constraint) in enumerate(zip(heard, (schema(content), None, regex("(abab|ab){30}x")), strict=True)):
            one.submit(job([number, 5], listener, 60, warp=Warp(0.0), constraint=constraint))
        finish(one)
        texts.append([(listener.tokens, listener.end) for listener in heard])
    assert texts[0] == texts[1]
    assert one.tokens_accepted > 20
    assert one.tokens_accepted <= one.tokens_proposed


def test_a_machine_that_is_lost_changes_no_token_of_a_constrained_answer():
    model, described = make("gpt")
    jobs = [([3, 1, 4], lambda: schema(SCHEMA)), ([8], lambda: regex("(ab|cd)*")), ([2, 2], lambda: None)]
    expected = []
    for prompt, constraint in jobs:
        one, heard = engine(LocalBackend(model)), Heard()
        one.submit(job(prompt, heard, 40, constraint=constraint()))
        finish(one)
        expected.append((heard.tokens, heard.end))
    with spread(model, described, ["pi0", "pi1"]) as (one, machines):
        split_evenly(one, 3)
        heard_here = [Heard() for _ in jobs]
        for (prompt, constraint), listener in zip(jobs, heard_here, strict=True):
            one.submit(job(prompt, listener, 40, constraint=constraint()))
        lost = next(stage.name for stage in one.backend.placement.current.stages if stage.name != SERVER_NODE)

        def pull() -> None:
            if lost in machines.running and len(heard_here[2].tokens) >= 8:
                machines.unplug(lost, one.backend.node_server)

        finish(one, pull)
        assert lost not in machines.running
    assert [(listener.tokens, listener.end) for listener in heard_here] == expected


@pytest.mark.long
def test_answers_by_a_thousand_random_schemas_are_all_valid(tmp_path: Path):
    tokenizer, draw = load_tokenizer(str(write_tokenizer(tmp_path, "qwen25"))), random.Random(7)
    torch.manual_seed(2)
    model = Gpt(model_schema.Gpt(hidden_size=32, num_layers=2, num_heads=4, max_seq_len=1024), tokenizer.vocab_size).eval()
    compiler = GrammarCompiler(tokenizer, (tokenizer.eos_id,), tokenizer.vocab_size)
    one = BatchingEngine(LocalBackend(model), most_running=16, most_waiting=1000, clock=itertools.count().__next__)
    asked = [(random_schema(draw), Heard()) for _ in range(1000)]
    for number, (content, heard) in enumerate(asked):
        constraint = compiler.compile(f"start: {json_rule(content)}\n")
        one.submit(job([number % 300, 3], heard, 900, constraint=constraint, eos_ids=frozenset({tokenizer.eos_id})))
    finish(one)
    for content, heard in asked:
        assert heard.end == "stop"
        jsonschema.validate(json.loads(tokenizer.decode(heard.tokens)), content)


def test_an_answer_that_cannot_go_on_ends_with_a_reason_of_its_own():
    compiler, heard = GrammarCompiler(CharacterTokenizer("abc"), (), VOCABULARY), Heard()
    one = engine(LocalBackend(make_model("learned")))
    one.submit(job([1], heard, 20, constraint=compiler.compile(LLMatcher.grammar_from_regex("[ab]{4}z|[ab]{5}z"))))
    finish(one)
    assert heard.end == "grammar"
    assert not one.running
