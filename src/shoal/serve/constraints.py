"""Grammars that an answer must follow: which tokens one allows next.

llguidance keeps the state of a grammar and computes masks over the vocabulary. It frees the interpreter's lock while it does, so the mask
for the next token is computed in a thread beside the model's step.

Shapes: B batch, V vocabulary, W words of 32 bits.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from threading import Lock
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from shoal.data import Tokenizer
from shoal.data.packages import import_optional
from shoal.errors import ShoalError
from shoal.models.generation.token_masks import masked, words_for
from shoal.untrusted.prompt_process import PromptProcess

_COMPILING, _MASKING = 2, 4
"""Threads that compile grammars and that compute masks. A grammar that takes long to compile lets no answer wait for its mask."""
_MOST_LETTERS = 1 << 17
_MOST_DEPTH = 64
"""Objects and arrays of a JSON schema that may lie within each other: llguidance compiles them by recursion."""
_LIMITS = {"max_lexer_states": 30_000, "max_grammar_size": 200_000, "step_max_items": 10_000, "verbose_errors": False}
"""A state takes up to 2 kB. Without the bound of the items a mask of `s: s s | /[a-z]/` took a second; with it 60 ms, and then the answer
ends. A schema of an object with 100 fields needs a fifth of it."""
_MISSING = "answers by a grammar need the Python package `llguidance`: pip install 'shoal[serve]'"


_CHECK_S, _CHECK_BYTES = 2.0, 2 << 30
"""Time and memory to compile a grammar in a process of its own, before it is compiled here. Chains of references can overflow a stack, and
chains of terminals can take half a minute."""
_QUICK_S = 0.2
"""A grammar that takes longer waits for others like it, and no other waits for it. Schemas of 100 fields take a tenth of that."""


class GrammarError(ShoalError):
    """A grammar that cannot be read, is too large, or that no text of the model's vocabulary follows."""


class SlowGrammarError(GrammarError):
    """A grammar that takes longer to compile than it may."""


class TokenConstraint:
    """The grammar of one answer, and how far the answer has come in it."""

    def __init__(self, matcher: Any, possible: NDArray[np.int32], threads: ThreadPoolExecutor) -> None:
        """`possible`: the tokens that may be allowed at all, in words."""
        self._matcher, self._possible, self._threads = matcher, possible, threads
        self.is_over = False
        """No token can follow, except one that ends the text. A thread may find it out, too, with the mask."""
        self.has_failed = False
        """The answer cannot be completed: no token of the vocabulary continues it, or the grammar became too complex."""
        self._mask: Future[Tensor] = threads.submit(self._compute_mask)

    def copy(self) -> TokenConstraint:
        """The grammar for another answer, as far as this one has come."""
        self._mask.result()
        return TokenConstraint(self._matcher.deep_copy(), self._possible, self._threads)

    def mask(self) -> Tensor:
        """The tokens that are allowed next, a bit for each [W]."""
        return self._mask.result()

    def advance(self, token: int) -> None:
        """Take the next token of the answer."""
        self._mask.result()  # the matcher is not for two threads at once
        self._matcher.consume_token(token)
        self._look()
        if not self.is_over:
            self._mask = self._threads.submit(self._compute_mask)

    def accepted(self, tokens: Sequence[int]) -> int:
        """How many of these tokens the grammar allows one after the other."""
        self._mask.result()
        return 0 if self.is_over else int(self._matcher.validate_tokens(list(tokens)))

    def _look(self) -> None:
        is_over = bool(self._matcher.is_stopped())
        self.has_failed = is_over and (self._matcher.is_error() or not self._matcher.is_accepting())
        self.is_over = is_over

    def _compute_mask(self) -> Tensor:
        words = np.zeros_like(self._possible)
        if not self._matcher.is_error():
            found = np.frombuffer(self._matcher.compute_bitmask(), np.int32)[: len(words)]
            np.bitwise_and(found, self._possible[: len(found)], out=words[: len(found)])
        self._look()
        return torch.from_numpy(words)


def apply_constraints(scores_BV: Tensor, constraints: Sequence[TokenConstraint | None]) -> Tensor:
    """The logits, with the lowest number for all tokens that a row's grammar does not allow."""
    rows = [row for row, one in enumerate(constraints) if one is not None]
    if not rows:
        return scores_BV
    words_KW = torch.stack([one.mask() for one in constraints if one is not None]).to(scores_BV.device)
    if len(rows) == len(constraints):
        return masked(scores_BV, words_KW)
    scores_BV = scores_BV.clone()
    scores_BV[rows] = masked(scores_BV[rows], words_KW)
    return scores_BV


class _CompileQueue:
    """Threads that compile grammars one after the other, and the process that tries each before."""

    def __init__(self, seconds: float) -> None:
        """`seconds`: for each grammar."""
        self.seconds = seconds
        self.threads = ThreadPoolExecutor(_COMPILING, "shoal-grammar")
        self._checker = PromptProcess("the compiler of grammars", _CHECK_BYTES, int(_CHECK_S) + 1, grammar_limits=_LIMITS)

    def check(self, grammar: str) -> None:
        """Raises GrammarError where a grammar cannot be compiled, and SlowGrammarError where it takes too long."""
        try:
            is_slow, reason = self._checker.ask([grammar, self.seconds])
        except ShoalError as stopped:
            raise GrammarError(f"it takes too much to compile: {stopped}") from None
        if is_slow:
            raise SlowGrammarError(f"it takes too much to compile: more than {self.seconds:g} seconds")
        if reason:
            raise GrammarError(_reason(reason))


class GrammarCompiler:
    """Compiles grammars for one tokenizer, in threads of its own."""

    def __init__(self, tokenizer: Tokenizer, eos_ids: Iterable[int], vocab_size: int) -> None:
        """`eos_ids`: the tokens that end an answer; `vocab_size`: that of the model."""
        self._tokenizer, self._eos_ids, self._vocab_size = tokenizer, frozenset(eos_ids), vocab_size
        self._quick, self._slow = _CompileQueue(_QUICK_S), _CompileQueue(_CHECK_S)
        self._masking = ThreadPoolExecutor(_MASKING, "shoal-mask")
        self._lock = Lock()
        self._vocabulary: tuple[Any, NDArray[np.int32]] | None = None

    async def compiled(self, write: Callable[[], str]) -> TokenConstraint:
        """The grammar that `write` returns, in the form that llguidance reads. One that takes long keeps only others like it waiting.
        Raises ShoalError."""
        loop = asyncio.get_running_loop()
        try:
            return await loop.run_in_executor(self._quick.threads, lambda: self.compile(write(), may_be_slow=False))
        except SlowGrammarError:
            return await loop.run_in_executor(self._slow.threads, lambda: self.compile(write()))

    def compile(self, grammar: str, *, may_be_slow: bool = True) -> TokenConstraint:
        """The grammar, in this thread. Raises GrammarError."""
        library = import_optional("llguidance", _MISSING)
        (self._slow if may_be_slow else self._quick).check(grammar)
        vocabulary, possible = self._read_vocabulary(library)
        matcher = library.LLMatcher(vocabulary, grammar, log_level=0, limits=library.LLParserLimits(**_LIMITS))
        if matcher.is_error():
            raise GrammarError(_reason(matcher.get_error()))
        constraint = TokenConstraint(matcher, possible, self._masking)
        if not constraint.mask().any() or constraint.is_over:
            raise GrammarError("no text of the model's vocabulary follows it")
        return constraint

    def close(self) -> None:
        """End the threads."""
        self._quick.threads.shutdown(wait=False)
        self._slow.threads.shutdown(wait=False)
        self._masking.shutdown(wait=False)

    def _read_vocabulary(self, library: Any) -> tuple[Any, NDArray[np.int32]]:
        """The tokenizer as llguidance has it, and the tokens that may be allowed. Raises GrammarError."""
        with self._lock:
            if self._vocabulary is None:
                read = _vocabulary_of(library, self._tokenizer, self._eos_ids)
                possible = np.zeros(words_for(self._vocab_size) * 32, np.uint8)
                possible[: self._vocab_size] = 1
                possible[[one for one in read.eos_tokens if one not in self._eos_ids and one < len(possible)]] = 0
                self._vocabulary = read, np.packbits(possible, bitorder="little").view(np.int32)
            return self._vocabulary


class _OwnVocabulary:
    """A tokenizer of Shoal's own, with the fields that llguidance reads."""

    bos_token_id = None

    def __init__(self, tokenizer: Tokenizer, tokens: Sequence[bytes]) -> None:
        self._tokenizer = tokenizer
        self.eos_token_id = len(tokens) if tokenizer.eos_id is None else tokenizer.eos_id
        self.special_token_ids = [self.eos_token_id]
        self.tokens = [*tokens, b"<end>"][: len(tokens) + (tokenizer.eos_id is None)]

    def __call__(self, text: str) -> list[int]:
        """The ids of a text that a grammar demands; none where the vocabulary lacks a letter of it."""
        try:
            return self._tokenizer.encode(text)
        except ShoalError:
            return []


def _vocabulary_of(library: Any, tokenizer: Tokenizer, eos_ids: Iterable[int]) -> Any:
    tokens, content = tokenizer.token_bytes(), tokenizer.as_json()
    try:
        if tokens is not None:
            return library.LLTokenizer(library.TokenizerWrapper(_OwnVocabulary(tokenizer, tokens)))
        if content is not None:
            ends = sorted(one for one in eos_ids if 0 <= one < tokenizer.vocab_size)
            return library.LLTokenizer(content, eos_token=ends or None)
    except ValueError as error:
        raise GrammarError(f"the tokenizer {tokenizer.name} does not say which bytes its tokens are: {_reason(str(error))}") from None
    raise GrammarError(f"the tokenizer {tokenizer.name} does not say which bytes its tokens are: save it as a tokenizer.json")


def _reason(message: str) -> str:
    return message.partition("<state>")[0].strip()[:500]


def check_size(value: Any) -> None:
    """Raises GrammarError where a JSON value or a text is larger than any grammar may be."""
    todo, letters = [(value, 0)], 0
    while todo:
        one, depth = todo.pop()
        letters += len(one) + 2 if isinstance(one, str | list | dict) else 8
        if depth > _MOST_DEPTH:
            raise GrammarError(f"it has more than {_MOST_DEPTH} objects and arrays within each other")
        if letters > _MOST_LETTERS:
            raise GrammarError(f"it has more than {_MOST_LETTERS:,} letters")
        if isinstance(one, dict):
            todo += [(part, depth + 1) for part in (*one, *one.values())]
        elif isinstance(one, list):
            todo += [(part, depth + 1) for part in one]
