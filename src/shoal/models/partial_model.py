"""A language model of which this process has some layers (pipeline parallelism), with the interface of the whole model.

All processes with a part of the model must call it together. The first embeds the tokens, each sends the residual stream to the next, and
the last computes the logits. The engine sends the stream.

Shapes: B batch, L tokens, D width, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from shoal.errors import ShoalError
from shoal.models.split_model import ModelEnds, ModelStage, make_ends, make_stage
from shoal.models.transformer import SideChannel, Trunk


class StageTransport:
    """How the residual stream is sent between the processes. The engine sets it."""

    receive: Callable[[], Tensor]
    """Receive the stream of the previous process."""
    send: Callable[[Tensor], None]
    """Send the stream to the next process."""
    share: Callable[[Tensor], Tensor]
    """Broadcast the logits of the last process; the others pass a tensor of the same size."""


class PartialCache:
    """The KV cache of this process's layers, and the number of tokens that it holds."""

    def __init__(self, own: Any) -> None:
        self.own, self.length = own, 0


class PartialModel(nn.Module):
    """The layers [first, last) of a model; the first process also has the embeddings, the last one the output matrix.

    Parameters have the names and the order that they have in the whole model. A tied matrix belongs to the first process; the last process
    has a copy that is not among its parameters.
    """

    def __init__(self, whole: Any, first: int, last: int, depth: int) -> None:
        super().__init__()
        self.vocab_size: int = whole.vocab_size
        self.max_seq_len: int | None = whole.max_seq_len
        self.begins, self.ends = first == 0, last == depth
        self.stage: ModelStage = make_stage(whole, first, last)
        self.before: ModelEnds | None = make_ends(whole, after=self.ends) if self.begins else None
        self.after: ModelEnds | None = self.before if self.begins and self.ends else make_ends(whole, before=False) if self.ends else None
        self.travel = StageTransport()
        shared = _shared_by_ends(whole) if not (self.begins and self.ends) else set()
        own_ids = {id(parameter) for _, parameter in super().named_parameters()}
        names = {name: parameter for name, parameter in whole.named_parameters() if id(parameter) in own_ids}
        self.tied = next((parameter for parameter in names.values() if id(parameter) in shared), None)
        """The tied matrix, in the first process and (as a copy) in the last."""
        copied = self.tied if not self.begins else None
        self.own = {name: parameter for name, parameter in names.items() if parameter is not copied}
        self.kept_buffers = dict(_kept_buffers(whole, self))
        self.before_layer: Callable[[int], None] = lambda layer: None
        """Called before each layer computes; −1 stands for the embeddings."""
        for number, layer in layers_in(self.stage).items():
            layer.register_forward_pre_hook(lambda module, given, number=int(number): self.before_layer(number))

    def named_parameters(self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True) -> Iterator[tuple[str, nn.Parameter]]:
        assert recurse
        assert remove_duplicate, "a tied matrix is one parameter"
        yield from ((f"{prefix}.{name}" if prefix else name, parameter) for name, parameter in self.own.items())

    def saved(self) -> Iterator[tuple[str, Tensor]]:
        """Parameters and buffers for a checkpoint, by their names in the whole model."""
        yield from self.own.items()
        for name, (owner, key) in self.kept_buffers.items():
            value = owner._buffers[key]
            assert value is not None
            yield name, value

    def forward(self, input_ids_BL: Tensor, **given: Any) -> Tensor:
        """Logits [B, L, V]; only the last process has them. `given`: see `through`."""
        assert self.after is not None, "the last process makes the logits"
        return self.after.logits(self.through(input_ids_BL, **given))

    def through(
        self,
        input_ids_BL: Tensor,
        *,
        cache: PartialCache | None = None,
        attention_mask: Tensor | None = None,
        beside: SideChannel | None = None,
        document_lengths: Tensor | None = None,
    ) -> Tensor:
        """The residual stream after the layers of this process."""
        past = cache.length if cache is not None else 0
        if self.before is not None:
            self.before_layer(-1)
            x_BLD = self.before.embed(input_ids_BL, past, attention_mask, document_lengths=document_lengths)
        else:
            x_BLD = self.travel.receive()
        own = cache.own if cache is not None else None
        given: dict[str, Any] = {"cache": own, "attention_mask": attention_mask, "beside": beside, "document_lengths": document_lengths}
        x_BLD = self.stage.through(x_BLD, input_ids_BL, **given)
        if cache is not None:
            cache.length += input_ids_BL.shape[1]
        return x_BLD

    def new_cache(self, capacity: int) -> PartialCache:
        return PartialCache(self.stage.new_cache(capacity))

    def next_logits(self, input_ids_BL: Tensor, cache: PartialCache, attention_mask: Tensor | None = None) -> Tensor:
        """Logits [B, V] of the token after these, in all processes."""
        x_BLD = self.through(input_ids_BL, cache=cache, attention_mask=attention_mask)
        if self.after is None:
            self.travel.send(x_BLD)
            return self.travel.share(x_BLD.new_empty(len(x_BLD), self.vocab_size, dtype=torch.float32))
        return self.travel.share(self.after.logits(x_BLD[:, -1:])[:, -1].float().contiguous())

    def gradient_checkpointing(self, enabled: bool) -> None:
        self.stage.gradient_checkpointing(enabled)


class PartialTrunk(PartialModel):
    """A part of one of Shoal's own transformers, which have side inputs and outputs."""

    new_beside = SideChannel
    after: Trunk

    def hidden(self, input_ids_BL: Tensor, **given: Any) -> Tensor:
        """Input of the output matrix, in the last process. `given`: see `through`."""
        return self.after.norm(self.through(input_ids_BL, **given))

    @property
    def output_weight(self) -> Tensor:
        return self.after.output_weight


def partial_model(whole: Any, first: int, last: int, depth: int) -> PartialModel:
    """This process's part of a model. The whole model can be freed afterwards."""
    kind = PartialTrunk if hasattr(whole, "new_beside") else PartialModel
    return kind(whole, first, last, depth)


def layers_in(stage: ModelStage) -> dict[str, nn.Module]:
    """The layers of a stage, by their numbers in the whole model."""
    found = next((module for module in stage.modules() if isinstance(module, nn.ModuleDict)), None)
    if found is None:
        raise ShoalError(f"a {type(stage).__name__} does not show its layers")
    return dict(found.items())


def _shared_by_ends(whole: Any) -> set[int]:
    """Parameters both before the first layer and after the last: tied matrices."""
    before, after = (make_ends(whole, before=entry, after=not entry) for entry in (True, False))
    return set(map(id, before.parameters())) & set(map(id, after.parameters()))


def _kept_buffers(whole: nn.Module, part: nn.Module) -> Iterator[tuple[str, tuple[nn.Module, str]]]:
    """The buffers of a part that are saved: their names in the whole model, and where they are in the part."""
    places = {id(value): (module, key) for module in part.modules() for key, value in module._buffers.items() if value is not None}
    for prefix, module in whole.named_modules():
        for key, value in module._buffers.items():
            if id(value) in places and key not in module._non_persistent_buffers_set:
                yield (f"{prefix}.{key}" if prefix else key), places[id(value)]
