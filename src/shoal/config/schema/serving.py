"""What is done with a trained model: answers, over an API and a page."""

from typing import Literal

from shoal.config.fields import NonNegativeFloat, NonNegativeInt, Port, PositiveFloat, PositiveInt, PositiveShare, Secret, Section


class Greedy(Section):
    """The most likely token."""

    temperature: NonNegativeFloat = 1.0
    """Has no influence on which token is the most likely; kept so that every way has one."""


class Sampling(Section):
    """A token drawn from the whole distribution."""

    temperature: NonNegativeFloat = 1.0
    """Above 1 more random, below 1 less; 0 takes the most likely."""


class TopK(Section):
    """A token drawn from the k most likely."""

    temperature: NonNegativeFloat = 1.0
    """Above 1 more random, below 1 less; 0 takes the most likely."""
    k: PositiveInt = 40
    """Tokens to draw from."""


class TopP(Section):
    """A token drawn from the fewest that together have probability p."""

    temperature: NonNegativeFloat = 1.0
    """Above 1 more random, below 1 less; 0 takes the most likely."""
    p: PositiveShare = 0.9
    """Probability the tokens to draw from have together."""


class TopKTopP(Section):
    """Top-k, then top-p."""

    temperature: NonNegativeFloat = 1.0
    """Above 1 more random, below 1 less; 0 takes the most likely."""
    k: PositiveInt = 50
    """Tokens to draw from, at most."""
    p: PositiveShare = 0.9
    """Probability the tokens to draw from have together."""


class Decoding(Section):
    """How the next token is chosen. A request may name any of the ways; `active` is the default."""

    active: Literal["greedy", "sampling", "top_k", "top_p", "top_k_top_p"] = "top_k"
    """The way that is used unless a request names another."""
    repetition_penalty: PositiveFloat = 1.0
    """Above 1, tokens that the prompt or the text has already become less likely; 1 changes nothing."""
    greedy: Greedy = Greedy()
    sampling: Sampling = Sampling()
    top_k: TopK = TopK()
    top_p: TopP = TopP()
    top_k_top_p: TopKTopP = TopKTopP()


class Serving(Section):
    """Inference, on one machine or with the layers spread over several."""

    num_nodes: PositiveInt | None = None
    """Machines the layers are spread over, the server counted; null: all of the cluster."""
    max_new_tokens: PositiveInt = 256
    """Longest answer, in tokens."""
    decoding: Decoding = Decoding()
    api_port: Port = 8080
    """Port of the HTTP API."""
    page_port: Port = 5050
    """Port of the chat page."""
    api_key: Secret | None = None
    """What clients must show; better in the environment as SHOAL_API_KEY. Null: only this machine may ask."""
    max_running: PositiveInt = 8
    """Answers that are written at once; each has a cache of its own."""
    max_waiting: PositiveInt = 64
    """Answers that may wait for a place; more are told to come again."""
    hidden_states: Literal["exact", "int8"] = "exact"
    """How hidden states travel between machines: in the type that the model computes in, or rounded to a byte each. With int8 answers are
    no longer exactly those of one machine."""
    prefix_cache_tokens: NonNegativeInt = 4096
    """Tokens of ended requests that stay in the caches: a prompt that begins like one of them is read from there on. 0: none."""
    request_timeout_s: PositiveFloat = 300.0
    """Longest time a request may take."""
