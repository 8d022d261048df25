"""From the settings to a Hugging Face network: pretrained weights, LoRA adapters, and Shoal's own layers where they compute the same."""

from __future__ import annotations

import warnings
from typing import Any

from torch import nn

from shoal.config import Run
from shoal.config.data_shapes import DataShapes
from shoal.config.rules.own_layers import against_adapters
from shoal.config.schema import model as schema
from shoal.config.schema.training import WHOLE_MATRICES, TorchOptimizer
from shoal.errors import ShoalError
from shoal.models.huggingface import pretrained
from shoal.models.huggingface.adapted_gpt import own_layers, reason_against
from shoal.models.huggingface.as_gpt import MIXTURES, GptConversion, gpt_conversion
from shoal.models.huggingface.frozen_weights import holds_experts, store_frozen
from shoal.models.huggingface.model import HuggingFace
from shoal.models.moe import Moe
from shoal.models.transformer import Trunk

_ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
"""The layers of mixtures that get LoRA matrices, where the settings name none: peft has no choice for them."""


def players(model: schema.HuggingFace, run: Run, shapes: DataShapes) -> dict[str, nn.Module]:
    token = run.hub.token.reveal() if run.hub.token else None
    network = HuggingFace(pretrained.load(model, token))
    _check_fit(network, model, run, shapes)
    conversion, reason = _conversion(network, model, run)
    if model.load != "fp32":
        store_frozen(network.inner, model.load)
        if run.training.precision.kind == "fp32" and any(holds_experts(one) for one in network.inner.modules()):
            raise ShoalError("model.load: experts that are stored as bf16 compute in it: set training.precision.kind to bf16")
    if model.lora is not None:
        network.inner = _with_lora(network.inner, model.lora)
        reason = reason or reason_against(network, conversion)
    if not reason:
        return {"model": _with_own_layers(network, conversion, run)}
    if run.engine.experts is not None:
        raise ShoalError(f"engine.experts: only a mixture with Shoal's own layers can be held in part, and {reason}")
    if model.layers == "own":
        raise ShoalError(f"model.layers: Shoal's own layers cannot train {model.pretrained} (model.pretrained): {reason}; set it to auto")
    if model.layers == "auto":
        network.kept_layers = f"the layers of transformers are kept (model.layers: auto): {reason}"
    return {"model": network}


def _steps_whole_matrices(run: Run) -> str:
    """The optimizer that may look at the shape or the name of a parameter: layers that hold several matrices as one are not for it. Empty:
    there is none."""
    chosen = run.training.optimizer
    if not isinstance(chosen, TorchOptimizer):
        return f"the optimizer {chosen.kind}"
    names = [chosen.name, *(player.name for player in run.training.players.values())]
    return next((name for name in names if name in WHOLE_MATRICES), "")


def _conversion(network: HuggingFace, model: schema.HuggingFace, run: Run) -> tuple[Any, str]:
    """How the network gets Shoal's own layers; else the reason why it keeps those of transformers."""
    if model.layers == "original":
        return None, "model.layers is original"
    if model.lora is not None:
        found = against_adapters(run.engine.kind, run.training.precision.kind, model.load, model.lora.dora)
        if found is not None:
            return None, f"{found[1]} ({found[0]})"
    whole = _steps_whole_matrices(run)
    if whole and model.lora is None and model.layers == "auto":
        return None, f"{whole} may step matrices one by one, and Shoal's own layers join some (training.optimizer)"
    conversion = gpt_conversion(network)
    if conversion is None or not conversion.trains_alike:
        where = "" if conversion is None else " in training, where it drops activations at other places"
        return None, f"Shoal's own layers do not compute the same as {type(network.inner).__name__}{where}"
    return conversion, ""


def _with_own_layers(network: HuggingFace, conversion: GptConversion, run: Run) -> Trunk:
    held = run.engine.experts
    if network.has_adapters:
        return own_layers(network, conversion)
    if held is not None and not isinstance(conversion.settings, schema.Moe):
        raise ShoalError("engine.experts: the model (model.pretrained) has no experts: a worker holds all of it")
    made = conversion.convert(network.state_dict().__getitem__, held).train()
    if isinstance(made, Moe):
        made.loads.reports = run.reports_loads
    return made


def _with_lora(inner: Any, lora: schema.Lora) -> nn.Module:
    """The model with frozen weights and trainable adapters."""
    try:
        import peft
        from peft.tuners.lora import ParamWrapper
    except ImportError as error:
        raise ShoalError("model.lora needs peft: pip install peft") from error
    targets = lora.target_modules or (_ATTENTION if inner.config.model_type in MIXTURES else ())
    config = peft.LoraConfig(
        task_type="CAUSAL_LM",
        r=lora.rank,
        lora_alpha=lora.alpha,  # type: ignore[arg-type]
        lora_dropout=lora.dropout,
        use_rslora=lora.rslora,
        use_dora=lora.dora,
        target_modules=list(targets) or None,
    )
    try:
        with warnings.catch_warnings():
            # GPT-2's matrices are transposed; peft handles that, and warns
            warnings.filterwarnings("ignore", message="fan_in_fan_out")
            warnings.filterwarnings("ignore", message="The following (rank|alpha)_pattern keys")
            adapted: nn.Module = peft.get_peft_model(inner, config)
    except ValueError as error:
        reason = str(error).strip().splitlines()[0].rstrip(".")
        raise ShoalError(f"model.lora.target_modules: {reason}; layers of this model: {', '.join(_layer_names(inner))}") from error
    if any(isinstance(one, ParamWrapper) for one in adapted.modules()):
        raise ShoalError(
            "model.lora.target_modules: the matrices of all experts of a layer are one tensor, beside which LoRA has none; "
            f"name others, such as {', '.join(_ATTENTION)}"
        )
    return adapted


def _layer_names(inner: nn.Module) -> list[str]:
    """The last name component of every layer with a matrix."""
    layers = (name for name, layer in inner.named_modules() if getattr(getattr(layer, "weight", None), "ndim", 0) == 2)
    return sorted({name.split(".")[-1] for name in layers})


def _check_fit(network: HuggingFace, model: schema.HuggingFace, run: Run, shapes: DataShapes) -> None:
    if shapes.vocab_size is not None and network.vocab_size < shapes.vocab_size:
        raise ShoalError(
            f"the model (model.pretrained: {model.pretrained}) knows {network.vocab_size} tokens, but the tokenizer (data.tokenizer) has "
            f"{shapes.vocab_size}; set data.tokenizer to null for the model's own"
        )
    length = run.data.sequence_length
    if network.max_seq_len is not None and length is not None and length > network.max_seq_len:
        raise ShoalError(
            f"data.sequence_length is {length}, but the model (model.pretrained: {model.pretrained}) takes {network.max_seq_len} tokens"
        )
