"""Rollouts with paged caches: one decoder for each policy, whose recorded steps serve all rollouts of a run.

The decoder computes in the type that training computes in. Where that is the type of the policy's own weights, it uses the policy itself;
else it has a copy of the weights, which is refreshed before each rollout. A model of Hugging Face is decoded by our own layers, from such a
copy, into which LoRA matrices are merged.

Shapes: B answers, A answers that go on, V vocabulary.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from shoal.models.generation.answer_buffers import AnswerBuffers
from shoal.models.generation.decoding import TokenDraws, require_finite
from shoal.models.generation.paged_cache import PAGE, pages_for
from shoal.models.generation.paged_decoding import PagedDecoder, StepKind, can_page, up_to_rung
from shoal.models.gpt import Gpt
from shoal.models.huggingface.as_gpt import GptConversion, gpt_conversion
from shoal.models.huggingface.lora import base_of, merged_weight
from shoal.models.huggingface.model import HuggingFace
from shoal.models.layers.value_head import ScalarHead
from shoal.models.moe import Moe

_WORTH = 16
"""Length of an answer from which on recording is worth its time."""
_LOOK_EVERY = 16
"""Steps between checks which answers are unfinished; a check waits for the GPU."""

_DECODERS: WeakKeyDictionary[nn.Module, RolloutDecoder] = WeakKeyDictionary()


def decoder_for(model: nn.Module, rows: int, prompt: int, answer: int) -> RolloutDecoder | None:
    """The decoder of a policy; None: it is sampled step by step. It must be whole on a CUDA GPU (sharded ones have other types), with
    linear layers that are not replaced by others."""
    if answer < _WORTH or not next(model.parameters()).is_cuda:
        return None
    found = _DECODERS.get(model)
    dtype = _computed_in(model)
    if found is None or found.dtype != dtype or not found.has_room(rows, prompt + answer):
        twin = twin_of(model, dtype)
        if twin is None:
            return None
        found = _DECODERS[model] = RolloutDecoder(model, twin, dtype, rows, prompt + answer)
    return found


def _computed_in(model: nn.Module) -> torch.dtype:
    parameter = next(model.parameters())
    kind = parameter.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else parameter.dtype


class Twin(NamedTuple):
    """The model that decodes for a policy."""

    model: Any
    refresh: Callable[[], None]
    """Copy the policy's weights."""


def twin_of(model: Any, dtype: torch.dtype) -> Twin | None:
    """None: the policy cannot be decoded with paged caches."""
    if isinstance(model, HuggingFace):
        return _twin_of_huggingface(model, dtype)
    plain = type(model) in (Gpt, Moe) and all(type(one) is nn.Linear for one in _products(model))
    if not plain or not can_page(model, dtype):
        return None
    changed = {id(one): one for one in _to_convert(model) if one.dtype != dtype}
    if not changed:
        return Twin(model, lambda: None)
    memo: dict[int, Any] = {key: nn.Parameter(torch.empty_like(one, dtype=dtype), requires_grad=False) for key, one in changed.items()}
    made = copy.deepcopy(model, memo).eval().requires_grad_(False)
    targets, sources = ([*one.parameters(), *one.buffers()] for one in (made, model))

    def refresh() -> None:
        for target, source in zip(targets, sources, strict=True):
            target.copy_(source)

    return Twin(made, refresh)


def _products(model: Any) -> Iterator[nn.Module]:
    """The linear layers whose products are computed in the type of autocast."""
    for one in model.blocks.modules():
        if isinstance(one, nn.Linear) and not getattr(one, "full_precision", False):
            yield one


def _to_convert(model: nn.Module) -> Iterator[nn.Parameter]:
    for module in model.modules():
        if not getattr(module, "full_precision", False) and not isinstance(module, ScalarHead):
            yield from module.parameters(recurse=False)


def _twin_of_huggingface(model: HuggingFace, dtype: torch.dtype) -> Twin | None:
    inner = base_of(model)
    conversion: GptConversion | None = None if inner is None else gpt_conversion(HuggingFace(inner))
    if inner is None or conversion is None:
        return None
    device = next(model.parameters()).device
    made = conversion.make().to_empty(device=device).to(dtype).requires_grad_(False)
    if not can_page(made, dtype):
        return None
    modules: Mapping[str, nn.Module] = dict(HuggingFace(inner).named_modules())

    def get(name: str) -> Tensor:
        module, _, own = name.rpartition(".")
        return merged_weight(modules[module], own)

    def refresh() -> None:
        for name, target in made.named_parameters():
            target.copy_(conversion.tensor(name, get))

    return Twin(made, refresh)


class RolloutDecoder:
    """Generates answers to prompts. Holds: the tokens are those of decoding step by step, near-ties aside."""

    def __init__(self, model: nn.Module, twin: Twin, dtype: torch.dtype, rows: int, longest: int) -> None:
        self.refresh, self.dtype, self.uses = twin.refresh, dtype, 0
        longest = min(longest, twin.model.max_seq_len)
        self.decoder = PagedDecoder(
            _shallow(twin.model) if twin.model is model else twin.model,
            rows=rows,
            longest=longest,
            tokens=rows * pages_for(longest) * PAGE,
            compiles=False,
        )
        self._addresses: list[int] = []

    def has_room(self, rows: int, tokens: int) -> bool:
        return rows <= self.decoder.most_rows and pages_for(tokens) <= self.decoder.tables_NP.shape[1]

    @torch.no_grad()
    def write(
        self,
        prompts: Sequence[Sequence[int]],
        draws: Sequence[TokenDraws],
        written: AnswerBuffers,
        any_goes_on: Callable[[bool], bool],
    ) -> None:
        """Generate all answers to their ends. `any_goes_on`: see `batch_sampling.sample`."""
        self._prepare()
        columns = written.answer_BT.shape[1]
        slots = [self._opened(len(prompt) + columns, written) for prompt in prompts]
        try:
            first = self.decoder.read(slots, prompts, [one.at(0) for one in draws], StepKind())
            assert first is not None
            written.put(first.tokens_R, first.log_probs_R, first.values_R)
            finite = (first.tokens_R >= 0).all() & self._write(slots, draws, written, any_goes_on)
        finally:
            for slot in slots:
                self.decoder.close(slot)
        require_finite(finite)

    def _prepare(self) -> None:
        """Refresh the weights. Recordings refer to their addresses. A decoder that is used again compiles its steps."""
        self.refresh()
        addresses = [one.data_ptr() for one in self.decoder.model.parameters()]
        self.uses += 1
        if addresses != self._addresses or self.uses == 2:
            self._addresses = addresses
            self.decoder.compiles = self.uses > 1
            self.decoder.forget_recordings()

    def _opened(self, tokens: int, written: AnswerBuffers) -> int:
        slot = self.decoder.open(tokens, written.warp)
        assert slot is not None
        return slot

    def _write(
        self, slots: Sequence[int], draws: Sequence[TokenDraws], written: AnswerBuffers, any_goes_on: Callable[[bool], bool]
    ) -> Tensor:
        columns, going = written.answer_BT.shape[1], list(range(len(slots)))
        finite = torch.ones((), dtype=torch.bool, device=written.answer_BT.device)
        for step in range(1, columns):
            if written.eos_id is not None and step % _LOOK_EVERY == 1:
                left = written.going_B.nonzero().squeeze(1).tolist()
                if not any_goes_on(bool(left)):
                    break
                if not left or up_to_rung(len(left)) < up_to_rung(len(going)):
                    going = left
            if not going:  # another process has unfinished answers
                continue
            result = self.decoder.step([slots[row] for row in going], [draws[row].at(step) for row in going], StepKind())
            finite &= (result.tokens_R >= 0).all()
            written.put(*_spread((result.tokens_R, result.log_probs_R, result.values_R), going, len(slots)))
        return finite


def _shallow(model: Any) -> Any:
    """The same modules in another object: a decoder must not keep the policy alive for which it is kept."""
    made = copy.copy(model)
    made.training = True  # so that modules in training mode are looked for
    return made


def _spread(columns: Sequence[Tensor | None], going: Sequence[int], rows: int) -> list[Any]:
    """Columns [A] of the answers that go on as columns [B]."""
    if len(going) == rows:
        return [*columns]
    index_A = torch.tensor(going, device=next(one.device for one in columns if one is not None))
    return [None if one is None else one.new_zeros(rows).index_copy_(0, index_A, one) for one in columns]
