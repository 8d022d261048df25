"""The feed of RLHF runs, which generates its own batches: prompts → answers → scores → advantages → mini-batches, over several passes.

The feed owns the reference model and the reward: they have no optimizer, and are neither sent nor saved. Holds: all random draws follow
from the run's seed and the number of the rollout, and the feed's state contains the answers that are being learned from, so a run that was
interrupted in the middle of a rollout continues with the same numbers.

In an engine of several processes each process answers its part of the prompts, and the answers are then gathered in all processes. So
advantages and checkpoints do not depend on the number of processes. Each process takes its part of every mini-batch.

Shapes: B answers, P tokens of the longest prompt, T tokens of the longest answer, L = P + T − 1.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from shoal import data
from shoal.config import Run
from shoal.config.fields import EMPTY
from shoal.config.schema.rlhf import Rlhf
from shoal.data.interfaces import State
from shoal.data.splits import held_out_numbers
from shoal.data.text.documents import Conversation
from shoal.data.text.preferences import Pair
from shoal.engines import Engine, World
from shoal.engines.learners.answers import AnswerFeed
from shoal.errors import ShoalError
from shoal.files import make_folder, write_file
from shoal.models.generation.batch_sampling import SampledAnswers, sample
from shoal.models.generation.decoding import group_draws
from shoal.models.generation.side_texts import SideTexts, make_side_texts, side_text_columns
from shoal.models.packed.layers import packing
from shoal.runs.rlhf.rewards.interface import Answer, Score
from shoal.tasks import Batch, advantages
from shoal.tasks.answer_logprobs import PromptAnswers, Reference, as_text, as_used
from shoal.tasks.base import IGNORED
from shoal.tasks.dpo import SIDES
from shoal.tasks.policy_gradient import PolicyGradient

_HELD_OUT = 64
"""Largest number of prompts in an evaluation."""
_HELD_OUT_FROM = 2**62
"""The number of the first held-out prompt; training prompts have smaller numbers."""
_MOST_PROMPTS = 10_000
"""Largest number of prompts taken from a text, evenly spread over it."""
_COLLAPSED = 0.5
"""Answers have collapsed if their length, or their share of distinct tokens, fell below this share of its initial value."""


class RolloutPrompt(NamedTuple):
    """A prompt, as the policy reads it."""

    ids: list[int]
    text: str
    answer: str | None = None
    context: str = ""
    context_ids: tuple[int, ...] = ()
    """The context that the policy reads beside the prompt."""
    own: tuple[str, ...] = ()
    """The documents that the prompt comes from; no passages are taken from them."""
    columns: Mapping[str, Any] = EMPTY
    """The other columns of its row, for rewards."""
    where: str = ""
    """Its file and line."""
    conversation: Conversation | None = None
    """Where the prompt is a conversation: its messages."""


def prompts_of(run: Run, samples: data.Data) -> tuple[list[RolloutPrompt], list[RolloutPrompt]]:
    """The training prompts and the held-out prompts."""
    assert run.rlhf is not None
    tokenizer, longest = samples.info.tokenizer, run.rlhf.ppo.prompt_length
    if tokenizer is None:
        raise ShoalError("a policy needs text: data.source gives no tokens")
    if run.rlhf.prompts is not None:
        encoder = data.PromptEncoder(tokenizer)
        asked = [_asked(prompt, encoder, longest) for prompt in data.read_prompts(run.rlhf.prompts, data.reads_context(run))]
        if data.reads_context(run) and samples.info.finder is None and not any(one.context for one in asked):
            raise ShoalError(
                f"model.cross_attention.enabled: there is nothing to attend to: no prompt of {run.rlhf.prompts} has a `context`, and "
                "model.retrieval is off"
            )
        held = held_out_numbers(len(asked), run.seed) if len(asked) > 1 else np.zeros(1, np.bool_)
        return [one for one, out in zip(asked, held, strict=True) if not out], [one for one, out in zip(asked, held, strict=True) if out]
    if samples.info.is_chat and run.data.source is not None and not run.data.source.has_pairs:
        raise ShoalError("the rows of data.source are conversations: name their file in rlhf.prompts, too, to ask what they ask last")
    return _beginnings(samples.train, tokenizer, run), _beginnings(samples.eval, tokenizer, run)[:_HELD_OUT]


def _asked(prompt: data.Prompt, encoder: data.PromptEncoder, longest: int, own: tuple[str, ...] = ()) -> RolloutPrompt:
    context_ids = tuple(encoder.tokenizer.encode(prompt.context)) if prompt.context else ()
    given = prompt.text, prompt.answer, prompt.context, context_ids, own, prompt.columns, prompt.where, prompt.conversation
    return RolloutPrompt(encoder.encode(prompt)[-longest:], *given)


def _beginnings(samples: Any, tokenizer: data.Tokenizer, run: Run) -> list[RolloutPrompt]:
    """The prompts of pairs, or the first tokens of texts."""
    assert run.rlhf is not None
    longest = run.rlhf.ppo.prompt_length
    if samples is None:
        return []
    if isinstance(samples, (data.RetrievalSamples, data.RetrievalStream)):  # passages are found when a prompt is answered
        samples = samples.inner
    if isinstance(samples, data.PreferencePairs):
        encoder = data.PromptEncoder(tokenizer)
        prompts = [
            (data.Prompt(pair.prompt, context=pair.context, conversation=_prompt_of(pair)), (pair.origin,))
            for pair in samples.pairs
            if pair.prompt
        ]
        return [_asked(prompt, encoder, longest, own) for prompt, own in prompts]
    batch, origins = _first_of_stream(samples, run) if isinstance(samples, data.SampleStream) else _spread_over(samples)
    found = []
    for row, own in enumerate(origins):
        row_L = batch["input_ids"][row]
        if "document_lengths" in batch:
            row_L = row_L[: int(batch["document_lengths"][row, 0])]
        ids = (row_L[batch["attention_mask"][row]] if "attention_mask" in batch else row_L)[:longest].tolist()
        context_ids = [token for token in batch["context_ids"][row, 0].tolist() if token >= 0] if "context_ids" in batch else []
        found.append(RolloutPrompt(ids, tokenizer.decode(ids), None, tokenizer.decode(context_ids), tuple(context_ids), own))
    return found


def _end_of_answers(tokenizer: data.Tokenizer, prompts: Sequence[RolloutPrompt]) -> int | None:
    """The token after which an answer is over: of conversations the one that ends the assistant's turn."""
    chats = any(prompt.conversation is not None for prompt in prompts)
    return data.PromptEncoder(tokenizer).end_id if chats else tokenizer.eos_id


def _prompt_of(pair: Pair) -> Conversation | None:
    """The prompt of a pair whose answers are messages."""
    chat = pair.conversation
    return chat and chat._replace(messages=chat.messages[: chat.prompt_messages])


def _spread_over(samples: data.Samples) -> tuple[Batch, list[tuple[str, ...]]]:
    """Some samples, evenly spread over all of them, and the documents that each comes from."""
    some = range(0, len(samples), -(-len(samples) // _MOST_PROMPTS))
    origins = getattr(samples, "origins", None)
    return samples.batch(some), [tuple(origins.of(number)) if origins is not None else () for number in some]


def _first_of_stream(samples: data.SampleStream, run: Run) -> tuple[Batch, list[tuple[str, ...]]]:
    """The samples that training would read first, as many as there are prompts in the run, and the documents that each comes from."""
    assert run.rlhf is not None
    assert run.data.shuffle_seed is not None  # derived with the configuration
    count = min(_MOST_PROMPTS, run.rlhf.ppo.steps * run.rlhf.ppo.rollout_size)
    drawn = list(islice(samples.read(shard=(0, 1), seed=run.data.shuffle_seed, epoch=0), count))
    return samples.collate(drawn), [tuple(sample.origins) for sample in drawn]


class Rollout(NamedTuple):
    """Answers with their scores and log-probability differences."""

    drawn: SampledAnswers
    text: PromptAnswers
    answers: list[Answer]
    scores_B: Tensor
    difference_BT: Tensor
    """log π − log π₀ of each token."""
    values_BT: Tensor | None = None
    """Predicted return of the rest of each answer; 0 after the end. None: no value function, or not requested."""

    @property
    def figures(self) -> Batch:
        """Metrics of each answer."""
        return {
            "score": self.scores_B,
            "kl": self.difference_BT.sum(1),
            "answer_length": self.drawn.real_BT.sum(1),
            "stopped_share": self.drawn.stopped_B,
        }


class RolloutFeed(AnswerFeed):
    """Mini-batches of the policy's own answers. An epoch is one rollout; its length is not known beforehand, since it may end early."""

    def __init__(
        self,
        run: Run,
        task: PolicyGradient,
        tokenizer: data.Tokenizer,
        prompts: Sequence[RolloutPrompt],
        held_out: Sequence[RolloutPrompt],
        reward: Score,
        engine: Engine | None = None,
        reference: Reference | None = None,
        finder: data.PassageFinder | None = None,
    ) -> None:
        """`task` must hold the policy before training: a copy of it is the reference model, unless `reference` is given. `engine`: steps
        the networks; it determines how they are placed, their precision, and which processes learn together. `finder`: finds the
        passages that the policy reads."""
        assert run.rlhf is not None
        if not prompts:
            raise ShoalError("there is no prompt to answer: set rlhf.prompts")
        self.settings: Rlhf = run.rlhf
        self.epochs, self.group = run.rlhf.ppo.steps, run.rlhf.group
        """`epochs`: rollouts of the whole run; `group`: answers to each prompt."""
        self._starts_at_random = run.rlhf.policy is None and run.model.kind != "huggingface"
        self._evaluates = run.evaluation.strategy != "never"
        self.seed, self.batches_per_step = run.seed, run.training.gradient_accumulation_steps
        self.warn: Callable[[str], None] = lambda text: None
        self.task, self.tokenizer, self.reward = task, tokenizer, reward
        self.eos_id, self.pad_id = _end_of_answers(tokenizer, prompts), tokenizer.pad_id
        self.prompts, self.held_out = list(prompts), list(held_out)
        self._read_with(finder)
        self.reference = reference or Reference(task.players["model"])
        self.world = World()
        self.precision: Callable[[], AbstractContextManager[Any]] = nullcontext
        if engine is not None:
            self._learn_with(engine, run.serving.weights)
        self.coefficient, self.spread = self.settings.kl.coefficient, advantages.RunningDeviation()
        self.epoch = self.position = 0
        self.buffer: Batch | None = None
        self._distance: float | None = None
        self.figures, self.first = dict[str, float](), dict[str, float]()
        """Metrics of the last rollout, and of the first one for comparison."""

    def _learn_with(self, engine: Engine, weights: str) -> None:
        """`weights`: how the matrices of the reference are held."""
        self.world, self.precision = engine.world, engine.precision
        self.reference = self.reference.held(packing(engine.hold, weights), self.task.players["model"])
        if self.micro_batch < self.world.size:
            raise ShoalError(
                f"{self.world.size} processes share mini-batches of {self.micro_batch} answers: raise rlhf.ppo.mini_batch_size, or take "
                "fewer devices"
            )

    def _read_with(self, finder: data.PassageFinder | None) -> None:
        self.finder, ppo = finder, self.settings.ppo
        self.reads_context = any(one.context_ids for one in [*self.prompts, *self.held_out])
        if finder is not None and ppo.prompt_length + ppo.response_length <= finder.chunk_size:
            raise ShoalError(
                f"model.retrieval.chunk_size: what is found for a chunk is read by the tokens after it, and prompts of {ppo.prompt_length} "
                f"tokens (rlhf.ppo.prompt_length) with answers of {ppo.response_length} (rlhf.ppo.response_length) have one chunk of "
                f"{finder.chunk_size}: set it lower"
            )

    # --- the interface of feeds --------------------------------------------------------------------

    @property
    def micro_batch(self) -> int:
        """Rows of a batch: answers, or pairs of answers."""
        return self.settings.ppo.mini_batch_size // self.settings.row // self.batches_per_step

    @property
    def most_batches(self) -> int:
        return self.settings.ppo.epochs * self._batches_of_pass

    @property
    def _batches_of_pass(self) -> int:
        """Batches that contain every answer once. Answers that workers sent may be fewer than a rollout's."""
        assert self.buffer is not None
        return -(-_rows(self.buffer) // self.micro_batch)

    @property
    def at_epoch_end(self) -> bool:
        """Whether the next batch belongs to new answers: all passes are done, or the policy has moved too far from the answers' one."""
        if self.buffer is None or self.position == 0 or self.position % self.batches_per_step:
            return False
        limit = self.settings.ppo.stop_kl
        return self.position >= self.most_batches or (limit is not None and self._moved() > limit)

    def _moved(self) -> float:
        """How far the policy has moved from that of the last mini-batch's answers, in nats per token. All processes must call this."""
        if self._distance is None:
            nats, tokens = torch.stack(self.task.moved).sum(0).tolist() if self.task.moved else (0.0, 0.0)
            nats, tokens = self.world.begin_sum([nats, tokens]).wait()
            self._distance = nats / max(1.0, tokens)
        return self._distance

    def __next__(self) -> Batch:
        if self.at_epoch_end:
            self.epoch, self.position, self.buffer = self.epoch + 1, 0, None
        if self.buffer is None:
            self.buffer = self._roll()
        if self.position % self.batches_per_step == 0:
            self.task.moved.clear()
            self._distance = None
        turn, number = divmod(self.position, self._batches_of_pass)
        order = np.random.default_rng([self.seed, self.epoch, turn, 1]).permutation(_rows(self.buffer))
        order = order[number * self.micro_batch : (number + 1) * self.micro_batch][self.world.rank :: self.world.size]
        self.position += 1
        return {name: value[torch.from_numpy(order)] for name, value in self.buffer.items()}

    def state_dict(self) -> State:
        return {
            "epoch": self.epoch,
            "position": self.position,
            "coefficient": self.coefficient,
            "spread": [self.spread.count, self.spread.mean, self.spread.squares],
            "approximate_kl": self._distance or 0.0,
            "figures": self.figures,
            "first": self.first,
            "buffer": self.buffer or {},
        }

    def load_state_dict(self, state: State) -> None:
        self.epoch, self.position, self.coefficient = state["epoch"], state["position"], state["coefficient"]
        self.spread = advantages.RunningDeviation(*state["spread"])
        self._distance = state["approximate_kl"]
        self.figures, self.first = dict(state["figures"]), dict(state["first"])
        self.buffer = {name: value.clone() for name, value in state["buffer"].items()} or None

    # --- rollouts ----------------------------------------------------------------------------------

    @property
    def prompts_per_rollout(self) -> int:
        return self.settings.ppo.rollout_size // self.group

    def _roll(self) -> Batch:
        first = self.epoch * self.prompts_per_rollout
        asked = [self.prompt(first + number) for number in range(self.prompts_per_rollout)]
        return self._learned_from(self.answered(asked, first, self.group, valued=True))

    def fill(self, version: int, numbers: Sequence[int], drawn: SampledAnswers) -> None:
        """Use these answers, which workers sent, for the next mini-batches: `group` answers to the prompt of each number."""
        asked = [self.prompt(number) for number in numbers for _ in range(self.group)]
        self.epoch, self.position, self.buffer = version, 0, self._learned_from(self.scored(asked, drawn, valued=True))

    def empty(self) -> None:
        """Drop the answers, which were learned from."""
        self.position, self.buffer = 0, None

    def ids_of(self, number: int) -> list[int]:
        return self.prompt(number).ids

    def contexts_of(self, numbers: Sequence[int]) -> list[list[int]]:
        return [list(self.prompt(number).context_ids) for number in numbers] if self.reads_context else []

    def documents_of(self, numbers: Sequence[int]) -> list[list[str]]:
        return [list(self.prompt(number).own) for number in numbers] if self.finder is not None else []

    def _beside(self, asked: Sequence[RolloutPrompt]) -> SideTexts | None:
        """The side texts that the policy reads with the answers to these prompts."""
        return make_side_texts(self.finder, [one.context_ids for one in asked] if self.reads_context else (), [one.own for one in asked])

    def _text(self, asked: Sequence[RolloutPrompt], drawn: SampledAnswers) -> PromptAnswers:
        """Prompts and answers as model input, with the same side texts as when the answers were generated."""
        text = as_text(*drawn[:4])
        return text._replace(beside=side_text_columns(self._beside(asked), text.input_ids_BL, text.mask_BL))

    def _learned_from(self, rollout: Rollout) -> Batch:
        """The answers of a rollout with the advantages of their tokens, or as pairs."""
        kl = self.settings.kl
        if self.settings.algorithm == "online-dpo":
            batch = self._paired(rollout)
        else:
            batch = rollout.text.as_batch() | {"log_probs": rollout.drawn.log_probs_BT} | self._credited(rollout)
            if kl.adaptive:
                moved = float(rollout.figures["kl"].mean())
                self.coefficient = advantages.adapted(self.coefficient, moved, kl.target, len(rollout.answers), kl.horizon)
        self._watch(rollout)
        return {name: value.cpu() for name, value in batch.items()}

    def prompt(self, number: int) -> RolloutPrompt:
        """The prompt with a number. Prompts are ordered by the seed, pass after pass."""
        turn, at = divmod(number, len(self.prompts))
        if self._order is None or self._order[0] != turn:
            self._order = turn, np.random.default_rng([self.seed, turn, 2]).permutation(len(self.prompts))
        return self.prompts[int(self._order[1][at])]

    _order: tuple[int, Any] | None = None

    def answered(self, asked: Sequence[RolloutPrompt], first: int, group: int = 1, *, valued: bool = False) -> Rollout:
        """Generate and score `group` answers to each prompt. Draws follow from the seed and the numbers of the prompts; the first prompt
        has the number `first`. Each process generates a part, and all processes get all answers."""
        ppo, rows = self.settings.ppo, [one for one in asked for _ in range(group)]
        draws = group_draws(self.seed, first, [one.ids for one in asked], group)
        own = self._own_part(len(rows))
        with self.precision():
            drawn = sample(
                self.task.players["model"],
                [rows[number].ids for number in own],
                max_new_tokens=ppo.response_length,
                temperature=ppo.temperature,
                draws=[draws[number] for number in own],
                eos_id=self.eos_id,
                pad_id=self.pad_id,
                width=max(len(one.ids) for one in rows),
                any_goes_on=self.world.any,
                beside=self._beside([rows[number] for number in own]),
            )
        return self._gathered(self.scored([rows[number] for number in own], drawn, valued=valued), rows)

    def _own_part(self, count: int) -> list[int]:
        """The rows, of `count`, of this process. All processes get equally many, so that they stay in step; the last may be repeated."""
        each = -(-count // self.world.size)
        return [min(self.world.rank * each + number, count - 1) for number in range(each)]

    def _gathered(self, part: Rollout, asked: Sequence[RolloutPrompt]) -> Rollout:
        """Gather the answers of all processes, of which `part` is this process's."""
        if self.world.size == 1:
            return part

        def whole(own: Tensor) -> Tensor:
            sent = own.cpu().to(torch.uint8 if own.dtype == torch.bool else own.dtype)
            return torch.cat(self.world.each(sent))[: len(asked)].to(own.dtype)

        drawn = SampledAnswers(*map(whole, part.drawn[:6]))
        values_BT = None if part.values_BT is None else whole(part.values_BT)
        answers = self._answers(asked, drawn)
        return Rollout(drawn, self._text(asked, drawn), answers, whole(part.scores_B), whole(part.difference_BT), values_BT)

    def scored(self, asked: Sequence[RolloutPrompt], drawn: SampledAnswers, *, valued: bool = False) -> Rollout:
        """Score answers, and compare each token's log-probability with the reference model's. `asked`: the prompt of each answer.
        `valued`: also predict values, if there is a value function."""
        ppo, text = self.settings.ppo, self._text(asked, drawn)
        with self.precision():
            reference_BT = self.reference.log_probs(text, ppo.temperature)[:, -ppo.response_length :]
            values_BT = self._expected(text, drawn) if valued else None
        difference_BT = (drawn.log_probs_BT - reference_BT) * drawn.real_BT
        answers = self._answers(asked, drawn)
        scores_B = torch.tensor(self.reward(answers), dtype=torch.float32, device=text.input_ids_BL.device)
        return Rollout(drawn, text, answers, scores_B, difference_BT, values_BT)

    @torch.no_grad()
    def _expected(self, text: PromptAnswers, drawn: SampledAnswers) -> Tensor | None:
        """The predicted return of the rest of each answer, if there is a value function: recorded during sampling, or computed."""
        if self.settings.algorithm != "ppo" or drawn.values_BT is not None:
            return drawn.values_BT
        with as_used(*self.task.players.values()):
            values_BT = self.task.values(text, self.settings.ppo.response_length)
        assert values_BT is not None
        return values_BT * drawn.real_BT

    def _answers(self, asked: Sequence[RolloutPrompt], drawn: SampledAnswers) -> list[Answer]:
        found = []
        for one, row_T, real_T in zip(asked, drawn.answer_BT, drawn.real_BT, strict=True):
            ids = [token for token in row_T[real_T].tolist() if token != self.eos_id]
            text = self.tokenizer.decode(ids)
            found.append(Answer(one.text, text, one.answer, one.context, one.own, one.columns, one.where, one.conversation))
        return found

    def _paired(self, rollout: Rollout) -> Batch:
        """The better and the worse answer to each prompt, with their log-probabilities under the reference model."""
        scores_N2 = self._scores(rollout).view(-1, 2)
        better_N = scores_N2.argmax(1)
        first_N = 2 * torch.arange(len(scores_N2), device=better_N.device)
        reference_B = (rollout.drawn.log_probs_BT - rollout.difference_BT).sum(1)
        batch: Batch = {"decided": scores_N2[:, 0] != scores_N2[:, 1]}
        for side, rows_N in zip(SIDES, (first_N + better_N, first_N + 1 - better_N), strict=True):
            batch |= {f"{side}{name}": value[rows_N] for name, value in rollout.text.as_batch().items()}
            batch[f"{side}reference"] = reference_B[rows_N]
        return batch

    def _scores(self, rollout: Rollout) -> Tensor:
        """Scores less the penalty for answers that did not stop, normalised by their spread if the settings say so."""
        scores_B = rollout.scores_B - self.settings.stop_penalty * ~rollout.drawn.stopped_B
        if self.settings.ppo.scale_scores:
            self.spread.add(scores_B)
            scores_B = scores_B / self.spread.deviation
        return scores_B

    def _credited(self, rollout: Rollout) -> Batch:
        """Answers with the advantage of each token, and for PPO the target of its value."""
        settings, ppo, real_BT = self.settings, self.settings.ppo, rollout.drawn.real_BT
        scores_B = self._scores(rollout)
        penalty_BT = advantages.kl_penalty(rollout.difference_BT, settings.kl.penalty)
        rewards_BT = advantages.token_rewards(scores_B, penalty_BT, self.coefficient, real_BT)
        if settings.algorithm != "ppo":
            grpo = settings.algorithm != "rloo"
            against = advantages.group_relative if grpo else advantages.leave_one_out
            advantages_BT = against(rewards_BT.sum(1), self.group)[:, None] * real_BT
            # GRPO's are normalised per group; whitening would give groups without differences a non-zero advantage.
            whitens = ppo.whiten_advantages and not grpo
            return {"advantages": advantages.whiten(advantages_BT, real_BT) if whitens else advantages_BT}
        values_BT = rollout.values_BT
        assert values_BT is not None
        if ppo.whiten_rewards:
            rewards_BT = advantages.whiten(rewards_BT, real_BT, shift=False)
        advantages_BT = advantages.gae(rewards_BT, values_BT, real_BT, ppo.gamma, ppo.gae_lambda)
        returns_BT = advantages_BT + values_BT
        self.figures["explained_variance"] = _explained(values_BT[real_BT], returns_BT[real_BT])
        return {
            "advantages": advantages.whiten(advantages_BT, real_BT) if ppo.whiten_advantages else advantages_BT,
            "values": values_BT,
            "returns": returns_BT,
        }

    # --- metrics and samples -----------------------------------------------------------------------

    def _watch(self, rollout: Rollout) -> None:
        means = {name: float(values_B.float().mean()) for name, values_B in rollout.figures.items()}
        low, middle, high = np.quantile(rollout.scores_B.tolist(), [0.1, 0.5, 0.9]).tolist()
        self.figures |= means | {"score_p10": low, "score_p50": middle, "score_p90": high}
        self.figures |= {"kl_coefficient": self.coefficient, "distinct_share": _distinct(rollout.text.labels_BL)}
        if not self.first:
            self.first = dict(self.figures)
        shrunk = [name for name in ("answer_length", "distinct_share") if self.figures[name] < _COLLAPSED * self.first[name]]
        if shrunk and self.figures["score"] > self.first["score"]:
            self.warn(
                f"the score rises while answers collapse ({shrunk[0]} {self.first[shrunk[0]]:.3g} → {self.figures[shrunk[0]]:.3g}): "
                "look at samples/, raise rlhf.kl.coefficient, or change the reward"
            )

    def start(self, warn: Callable[[str], None], new: bool) -> None:
        self.warn = warn
        if new and self._starts_at_random:
            warn("rlhf.policy is not given: the policy starts from random weights")

    def evaluation_batches(self, held_out: Callable[[], Iterator[Batch]] | None) -> Callable[[], Iterator[Batch]] | None:
        return self.answers_to_held_out if self.held_out and self._evaluates else None

    def answers_to_held_out(self) -> Iterator[Batch]:
        """Metrics of answers to held-out prompts, for an evaluation. Every evaluation uses the same draws."""
        rollout = self.answered(self.held_out, _HELD_OUT_FROM)
        self.shown = list(zip(rollout.answers, rollout.scores_B.tolist(), strict=True))
        yield rollout.figures

    def for_copy(self, task: Any) -> RolloutFeed:
        other = copy.copy(self)
        other.task, other.figures, other.reference = task, {}, self.reference.beside(task.players["model"])
        return other

    shown: Sequence[tuple[Answer, float]] = ()
    """Answers of the last evaluation with their scores."""

    def sample_writer(self) -> Callable[[Path], None]:
        def write(path: Path) -> None:
            make_folder(path.parent)
            parts = [f"[score {score:.3f}]\n{answer.prompt}⟶{answer.text}\n" for answer, score in self.shown[:8]]
            write_file(path, "\n".join(parts))

        return write


def _rows(buffer: Batch) -> int:
    return len(next(iter(buffer.values())))


def _explained(values_N: Tensor, returns_N: Tensor) -> float:
    """The share of the returns' variance that the values explain."""
    variance = float(returns_N.var(correction=0))
    return 1.0 - float((returns_N - values_N).var(correction=0)) / variance if variance > 0 else 0.0


def _distinct(labels_BL: Tensor) -> float:
    """The share of distinct tokens in an answer, averaged over answers."""
    rows = [row[row != IGNORED].tolist() for row in labels_BL]
    return sum(len(set(row)) / len(row) for row in rows) / len(rows)
