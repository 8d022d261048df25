"""Evaluates a model on the tasks of EleutherAI's lm-eval, in this process.

lm-eval asks for the log-probability of a text after another one, or for a text that is written greedily; the model of a run answers as in
`shoal generate`, without Hugging Face's classes.

Shapes: B rows, L tokens, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from shoal import data, models
from shoal.config.schema.serving import Decoding
from shoal.errors import ShoalError
from shoal.runs.trained_model import TrainedModel

_LONGEST_ANSWER = 256
"""Tokens of a written answer, where the task does not say it; lm-eval's own default."""
_SEED = 0
_NUMBERS_AT_ONCE = 1 << 26
"""Logits that are computed together."""


def evaluate_tasks(opened: Callable[[], TrainedModel], names: Sequence[str], folder: str | None, limit: int | None) -> dict[str, Any]:
    """The metrics of each task. `folder`: descriptions of further tasks. Raises ShoalError."""
    try:
        import lm_eval
        from lm_eval.tasks import TaskManager
    except ImportError as error:
        raise ShoalError(f"--tasks needs lm-eval ({error}): pip install lm-eval") from None
    if folder is not None and not Path(folder).is_dir():
        raise ShoalError(f"--task-folder: there is no folder {folder}")
    manager = TaskManager(include_path=folder)
    if unknown := [name for name in names if not manager.match_tasks([name])]:
        raise ShoalError(f"--tasks: lm-eval has no task {', '.join(unknown)}; `lm_eval ls tasks` lists them")
    model = _adapted(opened())
    try:
        found = lm_eval.simple_evaluate(model=model, tasks=list(names), limit=limit, task_manager=manager, bootstrap_iters=0)
    except (OSError, ConnectionError) as error:
        raise ShoalError(f"--tasks: the data of {', '.join(names)} cannot be loaded: {str(error).splitlines()[0]}") from None
    return {
        task: {name.removesuffix(",none"): float(value) for name, value in values.items() if _is_number(value) and "stderr" not in name}
        for task, values in found["results"].items()
    }


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _adapted(trained: TrainedModel) -> Any:
    """The model with lm-eval's interface."""
    from lm_eval.api.model import TemplateLM

    tokenizer, network = trained.tokenizer, trained.task.players.get("model")
    if tokenizer is None or network is None or not hasattr(network, "new_cache"):
        raise ShoalError(f"a model of kind {trained.run.model.kind} writes no text, and lm-eval evaluates only language models")
    scorer = TextScorer(network, tokenizer, trained.run.serving.decoding)

    class ShoalModel(TemplateLM):  # type: ignore[misc, unused-ignore]
        eot_token_id = scorer.first_id

        def tok_encode(self, string: str, **_: Any) -> list[int]:
            return scorer.tokenizer.encode(string)

        def _loglikelihood_tokens(self, requests: Any, **_: Any) -> list[tuple[float, bool]]:
            return scorer.score([(context, continuation) for _, context, continuation in requests])

        def loglikelihood_rolling(self, requests: Any, **_: Any) -> list[float]:
            return [scorer.score_text(request.args[0]) for request in requests]

        def generate_until(self, requests: Any, **_: Any) -> list[str]:
            return [scorer.write(*request.args) for request in requests]

    return ShoalModel()


class TextScorer:
    """Log-probabilities of texts, and texts that the model writes greedily."""

    def __init__(self, network: Any, tokenizer: data.Tokenizer, decoding: Decoding) -> None:
        self.network, self.tokenizer = network, tokenizer
        self.decoding = decoding.replace(active="greedy")
        self.device = next(network.parameters()).device
        self.longest: int | None = getattr(network, "max_seq_len", None)
        opening = [*tokenizer.opening, *([] if tokenizer.eos_id is None else [tokenizer.eos_id]), 0]
        self.first_id: int = opening[0]
        """What stands before a text without a context."""

    def score(self, requests: Sequence[tuple[Sequence[int], Sequence[int]]]) -> list[tuple[float, bool]]:
        """For each pair of a context and its continuation, as ids: the log-probability of the continuation, and whether greedy decoding
        gives it. Of a context the last part that fits is read."""
        rows = [self._row([*context, *continuation]) for context, continuation in requests]
        found: list[tuple[float, bool]] = [(0.0, True)] * len(rows)
        waiting = sorted((number for number, row in enumerate(rows) if len(row) > 1), key=lambda number: -len(rows[number]))
        while waiting:
            fitting = max(1, _NUMBERS_AT_ONCE // (len(rows[waiting[0]]) * int(self.network.vocab_size)))
            some, waiting = waiting[:fitting], waiting[fitting:]
            scores = self._scores([rows[number] for number in some], [len(requests[number][1]) for number in some])
            for number, score in zip(some, scores, strict=True):
                found[number] = score
        return found

    def _row(self, ids: list[int]) -> list[int]:
        return ids[-(self.longest + 1) :] if self.longest is not None else ids

    @torch.inference_mode()
    def _scores(self, rows: Sequence[list[int]], counts: Sequence[int]) -> list[tuple[float, bool]]:
        """Rows are padded on the right, where no token of theirs looks."""
        padded_BL = torch.zeros(len(rows), max(map(len, rows)), dtype=torch.long, device=self.device)
        for number, row in enumerate(rows):
            padded_BL[number, : len(row)] = torch.tensor(row)
        logits_BLV, found = self.network(padded_BL[:, :-1]), []
        for number, (row, asked) in enumerate(zip(rows, counts, strict=True)):
            count = min(asked, len(row) - 1)
            scores_LV = logits_BLV[number, len(row) - 1 - count : len(row) - 1].float().log_softmax(-1)
            target_L = padded_BL[number, len(row) - count : len(row)]
            right = bool((scores_LV.argmax(1) == target_L).all())
            found.append((float(scores_LV.gather(1, target_L[:, None]).sum()), right))
        return found

    def score_text(self, text: str) -> float:
        """The log-probability of a whole text: of pieces as long as the model reads, each after the last id of the one before."""
        ids, size = self.tokenizer.encode(text), self.longest or 1 << 30
        starts = range(0, len(ids), size)
        return sum(score for score, _ in self.score([([ids[at - 1] if at else self.first_id], ids[at : at + size]) for at in starts]))

    def write(self, context: str, settings: dict[str, Any]) -> str:
        """The text that the model writes greedily, up to the first text to stop at."""
        stops = settings.get("until") or []
        stops = [stops] if isinstance(stops, str) else list(stops)
        count = int(settings.get("max_gen_toks") or settings.get("max_new_tokens") or _LONGEST_ANSWER)
        ids = self.tokenizer.encode(context) or [self.first_id]
        if self.longest is not None:
            count = min(count, self.longest - 1)
            ids = ids[-(self.longest - count) :]
        written, text = "", data.StreamedText(self.tokenizer, ids)
        prompt = torch.tensor([ids], device=self.device)
        eos_id = self.tokenizer.eos_id
        for token in models.generate(self.network, prompt, max_new_tokens=count, decoding=self.decoding, seed=_SEED, eos_id=eos_id):
            if int(token) == eos_id:
                break
            written += text.add(int(token))
            if any(stop in written for stop in stops):
                break
        written += text.finish()
        cuts = [written.index(stop) for stop in stops if stop in written]
        return written[: min(cuts)] if cuts else written
