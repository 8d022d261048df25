"""The coordinator's learner in runs whose workers send rollouts: it checks each unit with one forward pass, and takes the optimizer steps.

A unit is some prompts with a few answers to each. Each token of an answer is determined by the weights of the version that the unit was
leased with and by a random draw that no worker can influence (`models/generation/decoding.py`). So one forward pass over the answers shows
for every token whether the draw yields it, and how probable it was; the policy learns from these probabilities.

Holds: no score is taken from a worker. A worker whose tokens differ from the draws too often over its last units is detected: differences
by rounding are tolerated, choosing among near tokens is not.

Shapes: B answers, P tokens of the longest prompt, T tokens of the longest answer, N tokens that count, V vocabulary.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor

from shoal.data import Feed, PassageFinder
from shoal.engines.learners.apply import ApplyPolicy, EngineLearner
from shoal.engines.single import SingleEngine
from shoal.errors import ShoalError
from shoal.models.generation.batch_sampling import SampledAnswers, pad_prompts, received_answers, sample, tokens_to_send
from shoal.models.generation.decoding import Warp, draw_gap, group_draws
from shoal.models.generation.side_texts import SideTexts, make_side_texts, side_text_columns
from shoal.protocol.frames import Frame, UpdateError
from shoal.tasks.answer_logprobs import as_text, as_used, chosen, log_softmax
from shoal.updates.answer_frames import InexactAnswers, unpack

_AT_ONCE = 8
"""Answers in one forward pass: the probabilities of the whole vocabulary are in memory for all their tokens at once."""
_UNITS_REMEMBERED = 16
_MOST_WORKERS = 4096
"""Workers whose share of inexact tokens is remembered; those that have been silent longest are dropped first."""
_DEVIATIONS = 3.0
"""Standard deviations by which a share must exceed the allowed one before it is treated as more than chance."""
_FAR = 0.25
"""Distance between a draw and its token, as a share of probability, that rounding cannot explain: the token comes from other weights or
another draw."""
_MOST_WEIGHT = 2.0
"""Upper limit of the importance ratio of a token that an older version sampled."""
_NEAR = 1e-9


class AnswerFeed(Feed):
    """Prompts by their number, and mini-batches of the answers that were given to them."""

    group: int
    """Answers to each prompt."""
    finder: PassageFinder | None
    """Finds the passages that answers read; None: they read none."""
    figures: dict[str, float]
    batches_per_step: int
    eos_id: int | None
    pad_id: int

    @property
    @abstractmethod
    def most_batches(self) -> int:
        """Batches that a rollout gives, unless it ends early because the policy has moved too far."""

    @abstractmethod
    def ids_of(self, number: int) -> list[int]:
        """The tokens of a prompt."""

    @abstractmethod
    def contexts_of(self, numbers: Sequence[int]) -> list[list[int]]:
        """The tokens that are read beside these prompts; empty where no prompt of the run has any."""

    @abstractmethod
    def documents_of(self, numbers: Sequence[int]) -> list[list[str]]:
        """The documents that the prompts are of; empty where no passages are read."""

    @abstractmethod
    def fill(self, version: int, numbers: Sequence[int], drawn: SampledAnswers) -> None:
        """Make the next mini-batches of these answers: `group` to the prompt of each number."""

    @abstractmethod
    def empty(self) -> None:
        """Drop the answers, which were learned from."""


@dataclass(frozen=True)
class RolloutStep(ApplyPolicy):
    """The coordinator learns from workers' answers with the run's own optimizer, in as many steps as the settings say."""

    length: int
    """Tokens of the longest answer."""
    temperature: float
    seed: int
    most_lag: int
    inexact_share: float
    """Share of a worker's tokens that may differ from what the draws yield."""
    computes = True

    def learner(self, engine: SingleEngine, spans: object, feed: Feed | None = None) -> AnswerLearner:
        assert isinstance(feed, AnswerFeed)
        return AnswerLearner(engine, self, feed)


class AnswerLearner(EngineLearner):
    """Learner whose weights are stepped with answers that were sampled from them or from one of their last versions."""

    def __init__(self, engine: SingleEngine, policy: RolloutStep, feed: AnswerFeed) -> None:
        super().__init__(engine)
        if engine.buffers.numel():
            raise ShoalError("this model keeps statistics beside its weights, which answers do not contain: set strategy.kind to local")
        self.policy, self.feed, self.intake = policy, feed, self
        self.network, self.model = engine.networks["model"], engine.task.players["model"]
        self.vocabulary = int(cast("Any", self.model).vocab_size)
        self.versions: dict[int, Tensor] = {}
        """Weights of the last versions: a unit that was leased with one of them still counts."""
        self.shares: OrderedDict[str, list[list[int]]] = OrderedDict()
        """For each worker's last units: the number of tokens that differed from the draws, and the number of all tokens."""

    @property
    def vector(self) -> Tensor:
        """The policy's weights: the value network is not sent to workers."""
        return self.network.vector.float().cpu()

    # --- units -------------------------------------------------------------------------------------

    def lease(self, first: int, prompts: int) -> dict[str, Any]:
        """The content of a unit's lease: its first prompt's number, prompts, their contexts and documents, and the end token."""
        numbers = range(first, first + prompts)
        content = {"first": first, "prompts": [self.feed.ids_of(number) for number in numbers], "end": self.feed.eos_id}
        side_texts = {"contexts": self.feed.contexts_of(numbers), "own": self.feed.documents_of(numbers)}
        return content | {name: value for name, value in side_texts.items() if value}

    def _beside(self, first: int, prompts: int, some: slice = slice(None)) -> SideTexts | None:
        """The side texts that some of the answers to a unit's prompts read."""
        numbers = [number for number in range(first, first + prompts) for _ in range(self.feed.group)][some]
        return make_side_texts(self.feed.finder, self.feed.contexts_of(numbers), self.feed.documents_of(numbers))

    def read(self, frames: Sequence[Frame], first: int, prompts: int, base: int, version: int, worker: str = "") -> tuple[Tensor, Tensor]:
        """The tokens of a unit's answers, and how probable each was [B, T]. Raises UpdateError.

        Probabilities of an older version are raised where needed, so that the importance ratio is at most `_MOST_WEIGHT`. `worker`: the
        worker that sent the answers; empty when answers that were accepted before are read again.
        """
        rows = prompts * self.feed.group
        tokens_BT = unpack(frames, rows, self.policy.length, self.vocabulary, self.feed.eos_id)
        if base != version and base not in self.versions:
            raise UpdateError(f"answers of version {base}, which is not kept any more")
        ids = [self.feed.ids_of(first + index) for index in range(prompts)]
        log_probs_BT, gaps_N = self._retraced(ids, first, tokens_BT, base if base != version else None)
        if worker:
            self._judge(worker, gaps_N, base)
        if base != version:
            now_BT, _ = self._retraced(ids, first, tokens_BT, None)
            log_probs_BT = torch.maximum(log_probs_BT, now_BT - math.log(_MOST_WEIGHT))
        return tokens_BT, log_probs_BT

    def answer(self, first: int, prompts: int) -> tuple[Tensor, Tensor]:
        """Generate a unit's answers as a worker does. Returns them, and the distance of each draw from the nearest other token, as a
        share of all probability [N]."""
        ids = [self.feed.ids_of(first + index) for index in range(prompts)]
        drawn = sample(
            self.model,
            [one for one in ids for _ in range(self.feed.group)],
            max_new_tokens=self.policy.length,
            temperature=self.policy.temperature,
            draws=group_draws(self.policy.seed, first, ids, self.feed.group),
            eos_id=self.feed.eos_id,
            pad_id=0,
            beside=self._beside(first, prompts),
        )
        tokens_BT = tokens_to_send(drawn).cpu()
        return tokens_BT, self._retraced(ids, first, tokens_BT, None)[1].neg().clamp(min=0.0)

    @torch.no_grad()
    def _retraced(self, ids: list[list[int]], first: int, tokens_BT: Tensor, base: int | None) -> tuple[Tensor, Tensor]:
        """How probable each token was with the weights of a version (None: the current ones), and its draw's distance from it."""
        draws, group = group_draws(self.policy.seed, first, ids, self.feed.group), self.feed.group
        rows = [one for one in ids for _ in range(group)]
        log_probs, gaps = [], []
        with self._at(base), as_used(self.model):
            for start in range(0, len(rows), _AT_ONCE):
                some = slice(start, start + _AT_ONCE)
                text = as_text(*self._sampled(rows[some], tokens_BT[some], torch.zeros(tokens_BT[some].shape))[:4])
                read = side_text_columns(self._beside(first, len(ids), some), text.input_ids_BL, text.mask_BL)
                text = text._replace(beside=read)
                log_p_NV = log_softmax(self.model, text, self.policy.temperature)
                log_probs.append(chosen(log_p_NV, text)[:, -tokens_BT.shape[1] :].cpu())
                lengths = (tokens_BT[some] >= 0).sum(1).tolist()
                wanted = [one.at(t) for one, length in zip(draws[some], lengths, strict=True) for t in range(length)]
                gaps.append(draw_gap(log_p_NV, Warp(1.0), text.labels_BL[text.counted_BL], wanted).cpu())
        return torch.cat(log_probs), torch.cat(gaps)

    def _sampled(self, rows: list[list[int]], tokens_BT: Tensor, log_probs_BT: Tensor) -> SampledAnswers:
        device = self.engine.device
        prompt_BP, mask_BP = pad_prompts(rows, self.feed.pad_id, device)
        return received_answers(prompt_BP, mask_BP, tokens_BT.to(device), log_probs_BT.to(device), self.feed.eos_id, self.feed.pad_id)

    @contextmanager
    def _at(self, base: int | None) -> Iterator[None]:
        """Load the policy of a version until the end of the block."""
        if base is None:
            yield
            return
        now = self.network.vector.clone()
        self.network.load(self.versions[base])
        try:
            yield
        finally:
            self.network.load(now)

    def _judge(self, worker: str, gaps_N: Tensor, base: int) -> None:
        """Raises InexactAnswers if a worker's tokens differ from the draws too often, or if one token cannot come from its draw at all."""
        units = self.shares.pop(worker, [])
        self.shares[worker] = units = [*units, [int((gaps_N > _NEAR).sum()), gaps_N.numel()]][-_UNITS_REMEMBERED:]
        while len(self.shares) > _MOST_WORKERS:
            self.shares.popitem(last=False)
        inexact, tokens = (sum(unit[column] for unit in units) for column in (0, 1))
        allowed = self.policy.inexact_share * tokens
        far = int((gaps_N > _FAR).sum())
        if far or inexact > allowed + _DEVIATIONS * math.sqrt(allowed):
            raise InexactAnswers(
                f"with the weights of version {base} the draws give other tokens at {units[-1][0]} of {units[-1][1]} positions"
                + (f", at {far} of them far from those that were sent" if far else f", and at {inexact} of {tokens} of its last units")
            )

    # --- steps -------------------------------------------------------------------------------------

    def learn(self, units: Sequence[tuple[int, int, Tensor, Tensor]], version: int) -> Mapping[str, float]:
        """Take the steps of one version. Each unit: its first prompt's number, the number of prompts, and what `read` returned."""
        units = sorted(units, key=lambda unit: unit[0])  # the result does not depend on the order of arrival
        numbers = [first + index for first, prompts, *_ in units for index in range(prompts)]
        rows = [self.feed.ids_of(number) for number in numbers for _ in range(self.feed.group)]
        drawn = self._sampled(rows, torch.cat([unit[2] for unit in units]), torch.cat([unit[3] for unit in units]))
        self.versions[version] = self.network.vector.clone()
        self.versions = {kept: vector for kept, vector in self.versions.items() if kept > version - self.policy.most_lag}
        self.feed.fill(version, numbers, drawn)
        figures = self._steps(version)
        self.feed.empty()
        self.engine.step_count = version + 1
        return figures

    def _steps(self, version: int) -> dict[str, float]:
        """Take the steps; the learning-rate schedule counts versions. Returns the means of their metrics, and the answers' metrics."""
        engine, feed, sums = self.engine, self.feed, dict[str, float]()
        taken = 0
        while not feed.at_epoch_end:
            result = engine.gradients([next(feed) for _ in range(feed.batches_per_step)])
            engine.unscale()
            metrics = result.metrics | engine.apply_own(version + taken * feed.batches_per_step / feed.most_batches)
            engine.step_count, taken = version, taken + 1
            for name, value in metrics.items():
                sums[name] = sums.get(name, 0.0) + float(value)
        return {name: value / taken for name, value in sums.items()} | feed.figures

    # --- what survives -----------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        return {"feed": self.feed.state_dict(), "versions": dict(self.versions), "shares": dict(self.shares)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if "feed" in state:
            self.feed.load_state_dict(state["feed"])
            self.versions = {int(version): vector.clone() for version, vector in state["versions"].items()}
            self.shares = OrderedDict((worker, [list(unit) for unit in units]) for worker, units in state["shares"].items())
