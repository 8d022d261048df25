"""Stages of any causal language model of transformers, whatever its family.

A stage is the model's own class, built with the stage's number of layers. Hooks put the residual stream in before the first layer and take
it out after the last; what the class computes before and after is discarded, and its parameters there are zeros that take no memory. The
ends are the same class with one layer that computes nothing. `check_anatomy` tests that the result equals that of the whole model.

Shapes: B batch, L tokens, S tokens seen (L and those in the cache), D width, V vocabulary.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Container, Iterator
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from shoal.errors import ShoalError
from shoal.models.huggingface.model import CACHE_NAMES, HuggingFace, HuggingFaceCache, mask_arguments
from shoal.models.huggingface.packing import document_arguments
from shoal.models.huggingface.small_copy import narrowed, small_copy
from shoal.models.layers.recompute import recomputed
from shoal.models.stages import without_weights
from shoal.models.transformer import SideChannel
from shoal.untrusted.huggingface import causal_model_of


class HuggingFaceStage(nn.Module):
    """Layers of a model of transformers."""

    def __init__(self, model: HuggingFace, first: int, last: int, seen: Anatomy | None = None) -> None:
        super().__init__()
        self.first, self.last = first, last
        whole = _plain(model)
        if seen is None:
            check_anatomy(whole)
        body, layers_name = _body(whole.config, first, last), _layers_name(whole)
        own = layers_of(body)
        for layer, source in zip(own, layers_of(whole)[first:last], strict=True):
            _adopt(layer, source)
        _empty_outside(body, layers_name)
        # Not as a submodule: its layers are registered under their names in the whole model
        self.__dict__["body"], self.__dict__["decoder"] = body, body.get_decoder()
        _register(self, ["inner", *layers_name.split(".")], {str(first + i): layer for i, layer in enumerate(own)})
        self.accepts = frozenset(inspect.signature(self.decoder.forward).parameters)
        self.checkpointing = False
        self.joins_rows = model.joins_rows
        self.train(whole.training)

    body: Any
    decoder: Any

    def through(
        self,
        x_BLD: Tensor,
        input_ids_BL: Tensor,
        *,
        cache: HuggingFaceCache | None = None,
        attention_mask: Tensor | None = None,
        beside: SideChannel | None = None,
        document_lengths: Tensor | None = None,
    ) -> Tensor:
        """The residual stream after these layers, as `Trunk.through`."""
        arguments = _arguments(self.accepts, x_BLD.shape[1], attention_mask, document_lengths)
        if self.checkpointing and cache is None and torch.is_grad_enabled():
            return recomputed(self, self._through, x_BLD, None, arguments)
        return self._through(x_BLD, cache, arguments)

    def _through(self, x_BLD: Tensor, cache: HuggingFaceCache | None, arguments: dict[str, Any]) -> Tensor:
        arguments = {**arguments, "use_cache": cache is not None}
        if cache is not None:
            arguments[CACHE_NAMES[0]] = cache.past
        layers, taken = layers_of(self.body), list[Tensor]()
        hooks = [
            layers[0].register_forward_pre_hook(_putting(x_BLD), with_kwargs=True),
            layers[-1].register_forward_hook(
                lambda module, given, output: taken.append(output[0] if isinstance(output, tuple) else output)
            ),
        ]
        try:
            output = self.decoder(inputs_embeds=x_BLD.detach(), **arguments)
        finally:
            for hook in hooks:
                hook.remove()
        if cache is not None:
            cache.past = output.past_key_values
        return taken[0]

    def new_cache(self, capacity: int) -> HuggingFaceCache:
        return HuggingFaceCache()

    def gradient_checkpointing(self, enabled: bool) -> None:
        self.checkpointing = enabled

    def train(self, mode: bool = True) -> HuggingFaceStage:
        self.body.train(mode)
        super().train(mode)
        return self

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> HuggingFaceStage:
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        # The layers moved; buffers outside them, such as rotary frequencies, must move too
        for _, module in _outside(self.body, _layers_name(self.body)):
            for name, buffer in module._buffers.items():
                module._buffers[name] = fn(buffer) if buffer is not None else None
        return self


class HuggingFaceEnds(nn.Module):
    """Everything of a model of transformers but its layers."""

    def __init__(self, model: HuggingFace, entry: bool, after: bool, seen: Anatomy | None = None) -> None:
        super().__init__()
        whole = _plain(model)
        seen = seen or check_anatomy(whole)
        self.vocab_size, self.max_seq_len = model.vocab_size, model.max_seq_len
        self.inner = _body(whole.config, 0, 1)
        layers_name = _layers_name(whole)
        self._stub = _Stub(layers_of(self.inner)[0], seen.returns_tuple)
        _adopt(self.inner, whole, but=layers_name)
        _empty_outside(self.inner, layers_name, (seen.before if entry else frozenset()) | (seen.after if after else frozenset()))
        self.train(whole.training)

    def embed(
        self, input_ids_BL: Tensor, past: int = 0, attention_mask: Tensor | None = None, *, document_lengths: Tensor | None = None
    ) -> Tensor:
        decoder = self.inner.get_decoder()
        accepts = inspect.signature(decoder.forward).parameters
        arguments = _arguments(accepts, input_ids_BL.shape[1], attention_mask, document_lengths)
        if past and attention_mask is None and "position_ids" in accepts:
            arguments["position_ids"] = torch.arange(past, past + input_ids_BL.shape[1], device=input_ids_BL.device).expand_as(input_ids_BL)
        self._stub.stops = True
        try:
            decoder(input_ids=input_ids_BL, use_cache=False, **arguments)
        except _ReachedError as reached:
            return reached.x_BLD
        finally:
            self._stub.stops = False
        raise AssertionError("the model did not come to its first layer")

    def last_hidden(self, x_BLD: Tensor) -> Tensor:
        """The last hidden states, which the output matrix reads, from the residual stream after the last layer."""
        hidden_BLD: Tensor = self._after(self.inner.get_decoder(), x_BLD).last_hidden_state
        return hidden_BLD

    def logits(self, x_BLD: Tensor) -> Tensor:
        logits_BLV: Tensor = self._after(self.inner, x_BLD).logits
        return logits_BLV

    def _after(self, part: Any, x_BLD: Tensor) -> Any:
        """What a part of the model computes where this residual stream comes out of its last layer."""
        self._stub.puts = x_BLD
        try:
            return part(inputs_embeds=x_BLD.detach(), use_cache=False)
        finally:
            self._stub.puts = None


def _arguments(accepts: Container[str], length: int, attention_mask: Tensor | None, document_lengths: Tensor | None) -> dict[str, Any]:
    if document_lengths is not None:
        return document_arguments(document_lengths, length)
    return mask_arguments(accepts, length, attention_mask)


class _ReachedError(Exception):
    """Raised at the first layer to end the forward pass: carries the residual stream."""

    def __init__(self, x_BLD: Tensor) -> None:
        super().__init__()
        self.x_BLD = x_BLD


class _Stub:
    """Replaces the computation of a layer. The layer keeps its attributes, which some models read."""

    def __init__(self, layer: Any, returns_tuple: bool) -> None:
        layer._modules.clear()
        layer._parameters.clear()
        layer._buffers.clear()
        layer.forward = self
        self.returns_tuple, self.stops = returns_tuple, False
        self.puts: Tensor | None = None

    def __call__(self, *given: Any, **named: Any) -> Any:
        x_BLD = given[0] if given else named["hidden_states"]
        if self.stops:
            raise _ReachedError(x_BLD)
        x_BLD = x_BLD if self.puts is None else self.puts
        return (x_BLD,) if self.returns_tuple else x_BLD


# --- the model's own class with other layers -------------------------------------------------------------


def layers_of(inner: Any) -> Any:
    """The list of a model's layers."""
    return inner.get_submodule(_layers_name(inner))


def _layers_name(inner: Any) -> str:
    """The name of the list of layers: the outermost ModuleList with one entry per layer."""
    count = inner.config.get_text_config().num_hidden_layers
    names: list[str] = [name for name, module in inner.named_modules() if isinstance(module, nn.ModuleList) and len(module) == count]
    if not names:
        raise ShoalError(f"{type(inner).__name__} has no list of {count} layers, so it cannot be cut into stages")
    return min(names, key=lambda name: name.count("."))


def _plain(model: HuggingFace) -> Any:
    if model.has_adapters:
        raise ShoalError(
            "a model with LoRA's matrices beside its weights cannot be cut into stages: export it, and serve what was exported"
        )
    return model.inner


def _body(config: Any, first: int, last: int) -> Any:
    """The model's class with the layers [first, last), without weights."""
    with without_weights():
        return causal_model_of(narrowed(config, first, last)).eval()


def _adopt(target: nn.Module, source: nn.Module, but: str = "\0") -> None:
    """Share the parameters and buffers of another module with the same structure, except below the name `but`."""
    for name, module in source.named_modules(remove_duplicate=False):
        if name != but and not name.startswith(f"{but}."):
            own = target.get_submodule(name)
            own._parameters.update(module._parameters)
            own._buffers.update(module._buffers)


def _outside(body: nn.Module, layers_name: str) -> Iterator[tuple[str, nn.Module]]:
    """The modules outside the layers, with their names."""
    yield from ((name, module) for name, module in body.named_modules() if name != layers_name and not name.startswith(f"{layers_name}."))


def _empty_outside(body: nn.Module, layers_name: str, used: frozenset[str] = frozenset()) -> None:
    """Replace parameters outside the layers, and outside the modules that are used, with expanded zeros, which take no memory."""
    for name, module in _outside(body, layers_name):
        for key, parameter in list(module._parameters.items()) if name not in used else ():
            if parameter is not None:
                del module._parameters[key]
                module.register_buffer(key, torch.zeros((), dtype=parameter.dtype).expand(parameter.shape), persistent=False)


def _register(owner: nn.Module, path: list[str], layers: dict[str, nn.Module]) -> None:
    for name in path[:-1]:
        inside = nn.Module()
        owner.add_module(name, inside)
        owner = inside
    owner.add_module(path[-1], nn.ModuleDict(layers))


def _putting(x_BLD: Tensor) -> Callable[..., Any]:
    """A pre-forward hook that replaces a layer's input."""

    def put(module: nn.Module, given: tuple[Any, ...], named: dict[str, Any]) -> Any:
        return ((x_BLD, *given[1:]), named) if given else (given, named | {"hidden_states": x_BLD})

    return put


# --- tests with a small copy of the model ---------------------------------------------------------------


class Anatomy(NamedTuple):
    """What a trial run of a small copy showed of a model."""

    returns_tuple: bool
    """Whether a layer returns a tuple."""
    before: frozenset[str]
    after: frozenset[str]
    """The modules that run before the first layer, and after the last."""


_KNOWN: dict[str, Anatomy] = {}


def check_anatomy(inner: Any) -> Anatomy:
    """Compare a small copy of a model whole and in stages, once for each config. Raises ShoalError where they differ."""
    key = f"{type(inner).__name__} {inner.config.to_json_string()}"
    if key not in _KNOWN:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            small = small_copy(inner.config)
            seen, failure = _record_calls(small), None
            try:
                equal = _same_when_cut(HuggingFace(small), seen)
            except (ShoalError, RuntimeError, ValueError, TypeError, KeyError, IndexError, AttributeError) as error:
                equal, failure = False, error
        if not equal:
            raise ShoalError(
                f"{type(inner).__name__} does not compute the same in pieces as whole, so its layers cannot be on several machines: "
                "serve it from one (--nodes 1)"
            ) from failure
        _KNOWN[key] = seen
    return _KNOWN[key]


@torch.no_grad()
def _record_calls(small: Any) -> Anatomy:
    """Which modules run before and after the layers, and what a layer returns."""
    layers_name, calls, outputs = _layers_name(small), list[str](), list[Any]()
    layers = small.get_submodule(layers_name)
    named = [(name, module) for name, module in small.named_modules() if name]
    hooks = [module.register_forward_pre_hook(lambda module, given, name=name: calls.append(name)) for name, module in named]
    hooks.append(layers[0].register_forward_hook(lambda module, given, output: outputs.append(output)))
    small(input_ids=torch.arange(4)[None], use_cache=False)
    for hook in hooks:
        hook.remove()
    first, last = calls.index(f"{layers_name}.0"), calls.index(f"{layers_name}.{len(layers) - 1}")
    after = [name for name in calls[last:] if not name.startswith(f"{layers_name}.")]
    return Anatomy(isinstance(outputs[0], tuple), frozenset(calls[:first]), frozenset(after))


@torch.no_grad()
def _same_when_cut(model: HuggingFace, seen: Anatomy) -> bool:
    """Compare prefill, one decode step, and a padded batch, whole and in stages."""
    count = len(layers_of(model.inner))
    bounds = sorted({0, count // 3, 2 * count // 3, count})
    stages = [HuggingFaceStage(model, first, last, seen) for first, last in pairwise(bounds)]
    ends, caches, whole_cache = HuggingFaceEnds(model, True, True, seen), [stage.new_cache(0) for stage in stages], model.new_cache(0)
    ids_BL = torch.tensor([[3, 1, 4, 1, 5, 9], [2, 7, 1, 8, 2, 8]])
    for past, piece in ((0, ids_BL), (6, ids_BL[:, :1])):
        whole = model(piece, cache=whole_cache)
        x_BLD = ends.embed(piece, past)
        for stage, cache in zip(stages, caches, strict=True):
            x_BLD = stage.through(x_BLD, piece, cache=cache)
        if not torch.equal(whole, ends.logits(x_BLD)):
            return False
    mask_BS = torch.tensor([[0, 0, 1, 1, 1, 1], [1, 1, 1, 1, 1, 1]])
    x_BLD = ends.embed(ids_BL, 0, mask_BS)
    for stage in stages:
        x_BLD = stage.through(x_BLD, ids_BL, attention_mask=mask_BS)
    return torch.equal(model(ids_BL, attention_mask=mask_BS), ends.logits(x_BLD))
