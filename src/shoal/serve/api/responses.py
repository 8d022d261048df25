"""Answers in OpenAI's form."""

from __future__ import annotations

import json
import math
import secrets
import time
from collections.abc import Sequence
from itertools import accumulate
from typing import Any

from shoal.data import Tokenizer
from shoal.serve.api.completion import Answer, Piece
from shoal.serve.batching import GeneratedToken


class Form:
    """One answer's shape: a chat's or a completion's."""

    def __init__(self, answer: Answer, model: str, tokenizer: Tokenizer) -> None:
        self.answer, self.model, self.tokenizer = answer, model, tokenizer
        self.chat = answer.asked.messages is not None
        self.prefix = "chat.completion" if self.chat else "text_completion"
        self.id = f"{'chatcmpl' if self.chat else 'cmpl'}-{secrets.token_hex(12)}"
        self.created = int(time.time())
        self._told: dict[int, int] = {}
        """Of each choice, how many characters the words have that were told with their probabilities, the echoed prompt before them."""

    def whole(self, pieces: Sequence[Piece]) -> dict[str, Any]:
        """The answer to a request that does not stream."""
        count = len(self.answer.prompts) * self.answer.asked.n
        choices = [self._choice(i, [piece for piece in pieces if piece.choice == i]) for i in range(count)]
        return {**self._head(self.prefix), "choices": choices, "usage": self.usage()}

    def chunk(self, piece: Piece, first: bool) -> str:
        """One event of a stream."""
        if self.chat:
            delta = ({"role": "assistant"} if first else {}) | ({"content": piece.text} if piece.text or first else {})
            body: dict[str, Any] = {"delta": delta}
        else:
            body = {"text": self._echo(piece.choice) + piece.text if first else piece.text}
        written = [piece.written] if piece.written is not None else []
        choice = {"index": piece.choice, **body, "logprobs": self._logprobs(piece.choice, written), "finish_reason": piece.reason}
        usage = {"usage": None} if self.answer.asked.include_usage else {}
        return event({**self._chunk_head(), "choices": [choice], **usage})

    def usage_chunk(self) -> str:
        return event({**self._chunk_head(), "choices": [], "usage": self.usage()})

    def usage(self) -> dict[str, Any]:
        read, written = self.answer.prompt_tokens, self.answer.tokens
        details = {"cached_tokens": self.answer.reused_tokens}
        return {"prompt_tokens": read, "completion_tokens": written, "total_tokens": read + written, "prompt_tokens_details": details}

    def _head(self, kind: str) -> dict[str, Any]:
        return {"id": self.id, "object": kind, "created": self.created, "model": self.model}

    def _chunk_head(self) -> dict[str, Any]:
        return self._head("chat.completion.chunk" if self.chat else self.prefix)

    def _choice(self, index: int, pieces: Sequence[Piece]) -> dict[str, Any]:
        text = "".join(piece.text for piece in pieces)
        message = {"role": "assistant", "content": text, "refusal": None}
        said: dict[str, Any] = {"message": message} if self.chat else {"text": self._echo(index) + text}
        written = [piece.written for piece in pieces if piece.written is not None]
        return {"index": index, **said, "logprobs": self._logprobs(index, written), "finish_reason": pieces[-1].reason}

    def _echo(self, index: int) -> str:
        if not self.answer.asked.echo:
            return ""
        return self.tokenizer.decode(self.answer.prompts[index // self.answer.asked.n])

    def _logprobs(self, index: int, written: Sequence[GeneratedToken]) -> dict[str, Any] | None:
        if self.answer.asked.top_logprobs is None:
            return None
        if self.chat:
            content = [self._named(one.token, one.logprob) | {"top_logprobs": self._others(one)} for one in written]
            return {"content": content, "refusal": None}
        words, begun = [self._word(one.token) for one in written], self._told.get(index)
        offsets = [*accumulate(map(len, words), initial=len(self._echo(index)) if begun is None else begun)]
        self._told[index] = offsets[-1]
        return {
            "tokens": words,
            "token_logprobs": [one.logprob for one in written],
            "top_logprobs": [self._by_word(one) for one in written],
            "text_offset": offsets[:-1],
        }

    def _by_word(self, written: GeneratedToken) -> dict[str, float]:
        """Tokens that show as the same word, such as parts of a character, are one entry, with the probability of the likelier one."""
        found: dict[str, float] = {}
        for other in written.others:
            word = self._word(other.token)
            found[word] = max(other.logprob, found.get(word, -math.inf))
        return found

    def _others(self, written: GeneratedToken) -> list[dict[str, Any]]:
        return [self._named(other.token, other.logprob) for other in written.others]

    def _named(self, token: int, logprob: float | None) -> dict[str, Any]:
        word = self._word(token)
        return {"token": word, "logprob": logprob, "bytes": list(word.encode("utf-8"))}

    def _word(self, token: int) -> str:
        return self.tokenizer.decode([token])


def event(body: dict[str, Any]) -> str:
    return f"data: {json.dumps(body, ensure_ascii=False)}\n\n"
