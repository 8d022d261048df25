"""LoRA through peft: low-rank adapters beside frozen weights."""

from __future__ import annotations

import warnings

from torch import nn

from shoal.config.schema import model as schema
from shoal.errors import ShoalError


def with_lora(inner: nn.Module, lora: schema.Lora) -> nn.Module:
    """The model with frozen weights and trainable adapters."""
    try:
        import peft
    except ImportError as error:
        raise ShoalError("model.lora needs peft: pip install peft") from error
    config = peft.LoraConfig(
        task_type="CAUSAL_LM",
        r=lora.rank,
        lora_alpha=lora.alpha,  # type: ignore[arg-type]
        lora_dropout=lora.dropout,
        target_modules=list(lora.target_modules) or None,
    )
    try:
        with warnings.catch_warnings():
            # GPT-2's matrices are transposed; peft handles that, and warns
            warnings.filterwarnings("ignore", message="fan_in_fan_out")
            adapted: nn.Module = peft.get_peft_model(inner, config)
    except ValueError as error:
        reason = str(error).strip().splitlines()[0].rstrip(".")
        raise ShoalError(f"model.lora.target_modules: {reason}; layers of this model: {', '.join(_layer_names(inner))}") from error
    return adapted


def _layer_names(inner: nn.Module) -> list[str]:
    """The last name component of every linear layer."""
    matrices = (name for name, parameter in inner.named_parameters() if parameter.dim() == 2 and name.endswith(".weight"))
    return sorted({name.split(".")[-2] for name in matrices})
