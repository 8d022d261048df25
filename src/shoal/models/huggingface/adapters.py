"""LoRA matrices as peft saves them, read without peft.

Holds: only safetensors are read; every matrix fits a weight of the model; what would be computed otherwise is refused.

Shapes: I input, O output, R rank.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from shoal.errors import ShoalError
from shoal.files import read_file

CONFIG = "adapter_config.json"
_WEIGHTS = "adapter_model.safetensors"
_MOST_CONFIG_BYTES = 16 << 20
_PREFIX = "base_model.model."
_WHOLE = ("modules_to_save", "layer_replication", "lora_bias", "trainable_token_indices", "target_parameters")
_VARIANTS = ("use_qalora", "use_bdlora", "arrow_config", "alora_invocation_tokens", "velora_config", "monteclora_config")
"""Settings of peft with which the result is another than that of the two matrices."""
_PLAIN_STARTS = (True, False, None, "gaussian", "eva")
"""Initial values of the matrices with which peft leaves the weights of the model as they are."""
_KINDS = {"lora_A.weight": "a", "lora_B.weight": "b", "lora_magnitude_vector": "magnitude", "lora_magnitude_vector.weight": "magnitude"}


class LoraPair(NamedTuple):
    """The matrices beside one weight."""

    a_RI: Tensor
    b_OR: Tensor
    scale: float
    magnitude_O: Tensor | None
    """DoRA: the norm of each row of the changed weight."""


class Adapters(NamedTuple):
    """LoRA matrices by the names of the modules that they change."""

    base: str
    """The folder, or the name on the hub, of the model."""
    pairs: dict[str, LoraPair]

    @torch.no_grad()
    def merge_into(self, inner: Any) -> None:
        """Add the products of the matrices to the weights. Raises ShoalError where they fit no weight."""
        modules = dict(inner.named_modules())
        for name, pair in self.pairs.items():
            module = modules.get(name)
            weight = getattr(module, "weight", None)
            if weight is None:
                raise ShoalError(f"the adapters change {name}, which {self.base} does not have: they belong to another model")
            turned = type(module).__name__ == "Conv1D"  # GPT-2 stores its matrices transposed
            weight_OI = weight.t() if turned else weight
            if weight_OI.shape != (pair.b_OR.shape[0], pair.a_RI.shape[1]):
                raise ShoalError(f"the adapters of {name} have another shape than the weight in {self.base}: they belong to another model")
            weight_OI.copy_(_changed(weight_OI, pair))


def _changed(weight_OI: Tensor, pair: LoraPair) -> Tensor:
    whole_OI = weight_OI.float() + pair.scale * (pair.b_OR.float() @ pair.a_RI.float())
    if pair.magnitude_O is None:
        return whole_OI
    return whole_OI * (pair.magnitude_O.float() / whole_OI.norm(dim=1)).unsqueeze(1)


def read_adapters(folder: Path) -> Adapters:
    """The adapters of a folder of peft. Raises ShoalError."""
    config = _config(folder / CONFIG)
    kinds: dict[str, dict[str, Tensor]] = {}
    for name, value in _tensors(folder / _WEIGHTS).items():
        kind = next((kind for kind in _KINDS if name.endswith(f".{kind}")), None)
        if kind is None or not name.startswith(_PREFIX):
            raise ShoalError(f"{folder / _WEIGHTS} holds {name}, and only LoRA matrices of linear layers are read: merge it with peft")
        kinds.setdefault(name.removeprefix(_PREFIX).removesuffix(f".{kind}"), {})[_KINDS[kind]] = value
    base = config["base_model_name_or_path"]
    beside = folder / base
    return Adapters(
        str(beside) if not Path(base).exists() and beside.is_dir() else base,
        {module: _pair(folder, module, parts, config) for module, parts in kinds.items()},
    )


def _pair(folder: Path, module: str, parts: Mapping[str, Tensor], config: Mapping[str, Any]) -> LoraPair:
    a_RI, b_OR, magnitude_O = parts.get("a"), parts.get("b"), parts.get("magnitude")
    fits = a_RI is not None and b_OR is not None and a_RI.dim() == b_OR.dim() == 2 and a_RI.shape[0] == b_OR.shape[1]
    if a_RI is None or b_OR is None or not fits or (magnitude_O is not None and magnitude_O.shape != b_OR.shape[:1]):
        raise ShoalError(f"{folder / _WEIGHTS} is damaged: the LoRA matrices of {module} do not fit each other")
    try:
        alpha = _of_pattern(config.get("alpha_pattern"), module, config["lora_alpha"])
    except (TypeError, ValueError, AttributeError) as error:
        raise ShoalError(f"{folder / CONFIG} is no configuration of LoRA adapters: alpha_pattern: {error}") from None
    rank = a_RI.shape[0]
    if not math.isfinite(alpha) or rank == 0:
        raise ShoalError(f"{folder / CONFIG}: the scale of {module} is not a finite number")
    return LoraPair(a_RI, b_OR, alpha / (math.sqrt(rank) if config.get("use_rslora") else rank), magnitude_O)


def _of_pattern(patterns: Any, module: str, default: float) -> float:
    """The value for a module, by the end of its name."""
    if not all(re.fullmatch(r"[\w.]+", name) for name in patterns or {}):
        raise ValueError("its keys must be the names of modules, or the ends of such names")
    found = [value for name, value in (patterns or {}).items() if module == name or module.endswith(f".{name}")]
    return float(found[0]) if found else float(default)


def _config(file: Path) -> dict[str, Any]:
    try:
        config = json.loads(read_file(file, _MOST_CONFIG_BYTES) or b"{}")
        named = {"peft_type": config.get("peft_type"), "bias": config.get("bias", "none")}
        if not isinstance(config["base_model_name_or_path"], str) or not math.isfinite(float(config["lora_alpha"])):
            raise ValueError("base_model_name_or_path or lora_alpha")
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ShoalError(f"{file} is no configuration of LoRA adapters: {error}") from None
    if unread := [name for name in _VARIANTS if config.get(name)]:
        raise ShoalError(f"{file} sets {unread[0]}, with which adapters compute more than two products: merge it with peft")
    if config.get("init_lora_weights") not in _PLAIN_STARTS:
        raise ShoalError(
            f"{file} says init_lora_weights: {config['init_lora_weights']}, which changes the weights of the model itself: let peft save "
            "it with path_initial_model_for_weight_conversion, or merge it with peft"
        )
    if named != {"peft_type": "LORA", "bias": "none"} or any(config.get(name) for name in _WHOLE):
        raise ShoalError(f"{file}: only LoRA matrices are read, without biases, whole modules or repeated layers: merge it with peft")
    return dict(config)


def _tensors(file: Path) -> dict[str, Tensor]:
    try:
        with safe_open(file, "pt") as opened:
            return {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
    except (OSError, SafetensorError) as error:
        raise ShoalError(f"{file} cannot be read: {error}; adapters are read from safetensors only") from None
