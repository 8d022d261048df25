"""Does a reward model tell which of two answers people preferred? Five folds of the pairs in ../shared/data, helpful and harmless.

The trunk is stories15M, which stays as it is, so what it says of each text (256 tokens of it, as many as it can read) is computed once. A
head learns on four folds at a time, with the task, the engine and the loss of a run, and is judged on the fifth. How much its weights
decay is chosen before that on a quarter of the four folds, which the head does not learn from meanwhile. Beside it stands the better of
two rules that read nothing: the longer answer wins, or the shorter one. The difference is paired: pair by pair, on those that were held
out.

Pairs are few and hidden states wide: with AdamW at a decay of 0.1 the head learned its pairs by heart, and knew less of others than their
lengths tell (helpful, 64 tokens: 58.1 %, the longer wins in 59.8).
"""

from __future__ import annotations

import math
import re
import statistics
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from rlhf import DATA, StoryTokenizer
from run import Row
from torch import Tensor, nn

from shoal.config.load import resolve_data
from shoal.config.schema.data import Preferences
from shoal.data.text.encoding import Encoding, Sample, collate
from shoal.data.text.preferences import Pair, answer_samples, read_preferences
from shoal.engines import SingleEngine
from shoal.models.layers.value_head import ScoreModel
from shoal.tasks.answer_logprobs import PromptAnswers, at_the_end, given_to
from shoal.tasks.reward import RewardModelTask

KINDS = ("helpful", "harmless")
FOLDS, PASSES, BATCH, RATE = 5, 15, 64, 0.01
DECAYS = (0.3, 1.0, 3.0, 10.0, 30.0)
LENGTH, AT_ONCE = 256, 16


class Words(StoryTokenizer):
    """The story model's tokens of any text: word by word, and letters that it has no piece for as bytes."""

    known_words: dict[str, list[int]]

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        return [self.encode(text) for text in texts]

    def encode(self, text: str) -> list[int]:
        self.known_words = getattr(self, "known_words", {})
        return [token for word in re.findall(r" ?[^ ]+| ", text) for token in self._word(word)]

    def _word(self, word: str) -> list[int]:
        if word not in self.known_words:
            parts = [part for letter in word for part in self._letter(letter)]
            self.known_words[word] = self._joined(parts)
        return self.known_words[word]

    def _letter(self, letter: str) -> list[str]:
        return [letter] if letter in self.known else [f"<0x{byte:02X}>" for byte in letter.encode()]

    def _joined(self, parts: list[str]) -> list[int]:
        while len(parts) > 1:
            scores = [self.known.get(one + other, (0, -math.inf))[1] for one, other in pairwise(parts)]
            at = max(range(len(scores)), key=scores.__getitem__)
            if scores[at] == -math.inf:
                break
            parts[at : at + 2] = [parts[at] + parts[at + 1]]
        return [self.known[part][0] for part in parts]


class Kept(nn.Module):
    """What a frozen trunk said of texts, by the texts' numbers."""

    def __init__(self, said_ND: Tensor) -> None:
        super().__init__()
        self.said_ND, self.width = said_ND, said_ND.shape[1]

    def hidden(self, numbers_BL: Tensor) -> Tensor:
        return self.said_ND[numbers_BL]


@torch.no_grad()
def said_of(model: Any, samples: Sequence[Sample], encoding: Encoding) -> Tensor:
    """The hidden state at each text's last token [N, D]. Texts of about one length are read together."""
    order = sorted(range(len(samples)), key=lambda number: len(samples[number].inputs))
    said_ND = torch.zeros(len(samples), model.output_weight.shape[1])
    for start in range(0, len(order), AT_ONCE):
        some = order[start : start + AT_ONCE]
        text = PromptAnswers.of(collate([samples[number] for number in some], encoding))
        hidden_BLD = model.hidden(text.input_ids_BL, **given_to(model, text))
        said_ND[some] = torch.stack([at_the_end(one_BL, text) for one_BL in hidden_BLD.unbind(-1)], -1)
    return said_ND


def read(kind: str) -> tuple[list[Pair], Tensor]:
    """Pairs, and what the trunk says of the chosen and the rejected answers, spread evenly around 0 [2N, D]."""
    from story_models import load_story_model

    pairs = read_preferences(Preferences(path=str(DATA / "preference" / f"hh_{kind}_base_test.jsonl.gz")))[0]
    tokenizer: Any = Words(DATA / "lm" / "stories15M.vocab.json.gz")
    encoding = Encoding(tokenizer, LENGTH, "dynamic")
    texts = [(pair.prompt, answer) for pair in pairs for answer in (pair.chosen, pair.rejected)]
    said_ND = said_of(load_story_model(DATA / "lm", "stories15M")[0], answer_samples(texts, encoding), encoding)
    return pairs, (said_ND - said_ND.mean(0)) / said_ND.std(0)


def batch_of(numbers: Sequence[int]) -> dict[str, Tensor]:
    """Pairs as the task takes them: each text is one token, its number."""
    ones_B1 = torch.ones(len(numbers), 1, dtype=torch.long)
    batch = {}
    for place, side in enumerate(("chosen_", "rejected_")):
        ids_B1 = torch.tensor([[2 * number + place] for number in numbers])
        batch |= {f"{side}input_ids": ids_B1, f"{side}labels": ids_B1, f"{side}attention_mask": ones_B1}
    return batch


def chosen_decay(said_ND: Tensor, train: Sequence[int], seed: int) -> float:
    """The decay with which a head that learns from three quarters of the pairs is right most often in the rest."""
    order = np.random.default_rng([seed, PASSES]).permutation(train).tolist()
    rest, others = order[: len(order) // 4], order[len(order) // 4 :]
    return max(DECAYS, key=lambda decay: float(judged(said_ND, others, rest, seed, decay).mean()))


def judged(said_ND: Tensor, train: Sequence[int], held_out: Sequence[int], seed: int, decay: float) -> np.ndarray:
    """For each pair that was held out whether the chosen answer has the higher score, after learning from the others."""
    optimizer = {"name": "SGD", "learning_rate": RATE, "weight_decay": decay}
    training = {"device": "cpu", "optimizer": optimizer, "schedule": {"kind": "cosine"}}
    tree = {"model": {"kind": "gpt"}, "seed": seed, "training": training}
    run = resolve_data(tree, name="bench", dialect="shoal", environ={}).run
    task = RewardModelTask({"model": ScoreModel(Kept(said_ND), head_only=True)})
    engine = SingleEngine(run, task, torch.device("cpu"), PASSES * -(-len(train) // BATCH))
    for turn in range(PASSES):
        order = np.random.default_rng([seed, turn]).permutation(train).tolist()
        for start in range(0, len(order), BATCH):
            engine.step([batch_of(order[start : start + BATCH])])
    with torch.no_grad():
        scores = [task.score(PromptAnswers.of(batch_of(held_out), side)) for side in ("chosen_", "rejected_")]
    return (scores[0] > scores[1]).numpy()


def by_length(pairs: Sequence[Pair], longer: bool) -> np.ndarray:
    """For each pair whether a rule is right that looks at lengths alone; of equal lengths it is right half the time."""
    differences = np.array([len(pair.chosen) - len(pair.rejected) for pair in pairs])
    right = np.where(differences == 0, 0.5, (differences > 0) == longer)
    return right.astype(float)


def folds(kind: str) -> Row:
    pairs, said_ND = read(kind)
    order = np.random.default_rng(0).permutation(len(pairs))
    won = np.zeros(len(pairs))
    shares = []
    for number, held_out in enumerate(np.array_split(order, FOLDS)):
        train = np.setdiff1d(order, held_out).tolist()
        won[held_out] = judged(said_ND, train, held_out.tolist(), number, chosen_decay(said_ND, train, number))
        shares.append(float(won[held_out].mean()))
    rule = max((by_length(pairs, longer) for longer in (True, False)), key=lambda right: float(right.mean()))
    gained = won - rule
    half = 1.96 * gained.std() / math.sqrt(len(gained))
    note = f"{gained.mean():+.3f} ± {half:.3f} over the rule by length; folds {', '.join(f'{one:.3f}' for one in shares)}"
    return Row(
        f"reward model, {kind}", won.mean(), rule.mean(), "share right", statistics.mean(won) / rule.mean(), "interval above 0", note
    )


def measure() -> Iterator[Row]:
    torch.set_num_threads(1)
    for kind in KINDS:
        yield folds(kind)
