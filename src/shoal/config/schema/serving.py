"""Inference: decoding, ports, limits."""

import re
from typing import Annotated, Literal

from shoal.config.fields import (
    NonNegativeFloat,
    NonNegativeInt,
    NumberBounds,
    Port,
    PositiveFloat,
    PositiveInt,
    PositiveShare,
    Secret,
    Section,
)


class Greedy(Section):
    """Always the most likely token."""

    temperature: NonNegativeFloat = 1.0
    """No effect on the most likely token; present so that every method has a temperature."""


class Sampling(Section):
    """A token drawn from the whole distribution."""

    temperature: NonNegativeFloat = 1.0
    """Above 1 more random, below 1 less; 0 takes the most likely."""


class TopK(Sampling):
    """A token drawn from the k most likely."""

    k: PositiveInt = 40
    """Tokens to draw from."""


class TopP(Sampling):
    """A token drawn from the fewest that together have probability p."""

    p: PositiveShare = 0.9
    """Probability the tokens to draw from have together."""


class TopKTopP(Sampling):
    """Top-k, then top-p."""

    k: PositiveInt = 50
    """Tokens to draw from, at most."""
    p: PositiveShare = 0.9
    """Probability the tokens to draw from have together."""


class Decoding(Section):
    """How the next token is chosen. A request may name any method; `active` is the default."""

    active: Literal["greedy", "sampling", "top_k", "top_p", "top_k_top_p"] = "top_k"
    """Method for requests that name none."""
    repetition_penalty: PositiveFloat = 1.0
    """Above 1, tokens that already occur in prompt or answer become less likely; 1 changes nothing."""
    greedy: Greedy = Greedy()
    sampling: Sampling = Sampling()
    top_k: TopK = TopK()
    top_p: TopP = TopP()
    top_k_top_p: TopKTopP = TopKTopP()


class Serving(Section):
    """Inference, on one machine or with the layers spread over several."""

    num_nodes: PositiveInt | None = None
    """Machines the layers are spread over, the server counted; null: all of the cluster."""
    spread: Literal["even", "fast"] = "fast"
    """How layers go to machines. fast: by their speed and memory, so that a token takes the least time; a machine that would only slow the
    others down gets no layers and stands by. even: every machine gets layers, equally many as far as its memory allows."""
    weights: Literal["auto", "fp32", "bf16", "int8", "int4"] = "auto"
    """How the model's matrices are held in memory and sent to machines. auto: as they are stored; bf16 stays bf16. int8: one scale per row;
    int4: a scale and an offset for every 32 numbers, with token embedding, output matrix and small matrices in int8. For models of the
    kinds gpt and huggingface. bf16, int8 and int4 are also for the linear layers of models that `generate` and `eval` open, of the frozen
    reference model of dpo, kto and feedback, and of reward models and judges."""
    max_new_tokens: PositiveInt = 256
    """Longest answer, in tokens."""
    decoding: Decoding = Decoding()
    api_port: Port = 8080
    """Port of the HTTP API."""
    page_port: Port = 5050
    """Port of the chat page."""
    api_key: Secret | None = None
    """Key that clients must send; set it in the environment as SHOAL_API_KEY instead. Null: only this machine is served."""
    allow_origins: tuple[str, ...] = ()
    """Origins, such as https://chat.example, whose pages may use the HTTP API from a browser (CORS). Pages of other origins may not."""
    memory: str = "auto"
    """Memory for all models that are served together, their weights and KV caches, such as 8GB or 512MiB. A model that was not used for
    longest is unloaded where another needs its memory. auto: four fifths of what is free when the server starts."""
    max_running: PositiveInt | Literal["auto"] = "auto"
    """Most answers of a model that are generated at the same time; each has its own KV cache. auto: as many as there is memory for caches
    beside the weights (of up to 4,096 tokens each), at most 16 on a CPU and 64 on a GPU; 8 where the layers are on several machines."""
    max_waiting: PositiveInt = 64
    """Most requests in the queue; further ones get status 429."""
    hidden_states: Literal["exact", "int8"] = "exact"
    """Hidden states between machines: in the model's own type, or rounded to one byte each. With int8, answers are no longer exactly those
    of one machine."""
    prefix_cache_tokens: NonNegativeInt = 4096
    """Tokens of finished requests that stay in the prefix cache: a prompt with the same beginning skips it. They take at most
    half of the memory for caches. 0: no cache."""
    proposed_tokens: Annotated[int, NumberBounds(at_least=0, at_most=16)] | None = None
    """Most tokens that are proposed after the last one of an answer and verified in the same step (speculative decoding). What is proposed
    followed where the last tokens occurred before, in the prompt or the answer; texts stay the same. Null: as many as save time, by what
    steps took. 0: none."""
    request_timeout_s: PositiveFloat = 300.0
    """Time limit of a request, in seconds."""


_UNITS = {"kB": 1e3, "MB": 1e6, "GB": 1e9, "TB": 1e12, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}


def bytes_of(memory: str) -> int | None:
    """A size such as 8GB as bytes; None for auto. Raises ValueError."""
    if memory == "auto":
        return None
    found = re.fullmatch(r"([0-9]{1,12}(?:\.[0-9]{1,6})?) ?([a-zA-Z]{2,3})", memory)
    units = {unit.lower(): size for unit, size in _UNITS.items()}
    if found is None or found[2].lower() not in units or not float(found[1]):
        raise ValueError(f"`{memory[:50]}` is no size: write a number and {', '.join(_UNITS)}, or auto")
    return int(float(found[1]) * units[found[2].lower()])
