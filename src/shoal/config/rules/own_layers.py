"""Which settings keep the layers of transformers in a model with LoRA adapters, where Shoal's own layers would compute the same."""

from __future__ import annotations

from shoal.config.schema.training import EMULATED

GATHERING = ("fsdp", "deepspeed")
"""Engines that treat the modules of a network one by one."""


def against_adapters(engine: str, precision: str, load: str, dora: bool) -> tuple[str, str] | None:
    """The setting that keeps the layers of transformers under LoRA, and the reason; None: no setting does."""
    if engine in GATHERING:
        return "engine.kind", f"{engine} treats modules one by one, and Shoal's own layers read adapters that are in other modules"
    if precision in EMULATED:
        return (
            "training.precision.kind",
            f"{precision} replaces single linear layers, and Shoal's own layers join several with their adapters",
        )
    if dora:
        return "model.lora.dora", "DoRA needs the norms of single weights, and Shoal's own layers join several"
    if load != "fp32" and precision == "fp32":
        reason = f"in float32 the output matrix would be restored from {load} as a whole"
        return "training.precision.kind", reason
    return None
