"""`TrainerConfig`: the settings of the diloco dialect as a Python dataclass."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import MISSING, dataclass, field, fields
from typing import Any

from shoal.config.load import LoadedConfig, Override, resolve_data
from shoal.config.schema import Run


@dataclass
class TrainerConfig:
    """Fine-tune a Hugging Face model with DiLoCo over FSDP. The same fields work as YAML."""

    model_name: str
    dataset_name: str
    subset: str | None = None
    output_dir: str = "runs"
    text_field: str | None = None
    seq_len: int = 1024
    batch_size: int = 1
    grad_accum: int = 1
    dynamic_batch: bool = False
    lr: float = 1e-5
    outer_lr: float = 0.7
    outer_momentum: float = 0.9
    outer_lr_schedule: str | None = None
    max_steps: int = 500
    diloco_loops: int = 10
    inner_opt: str = "AdamW"
    inner_opt_kwargs: dict[str, Any] = field(default_factory=dict)
    outer_opt: str = "SGD"
    outer_opt_kwargs: dict[str, Any] = field(default_factory=dict)
    outer_grad_clip: float | None = None
    checkpoint_steps: int = 0
    resume_from: str | None = None
    log_with: str | None = None
    log_dir: str | None = None
    eval_batches: int = 0
    num_workers: int = 0
    seed: int = 42
    shuffle_buffer: int = 10_000

    def resolve(self, environ: Mapping[str, str] | None = None, overrides: Iterable[Override] = ()) -> LoadedConfig:
        """Check the fields, as a file with the same keys would be checked. Shoal chooses the value of a field that is None."""
        given = {item.name: getattr(self, item.name) for item in fields(self)}
        given = {name: value for name, value in given.items() if value is not None}
        return resolve_data(given, name="TrainerConfig", dialect="diloco", environ=environ, overrides=overrides, key_style=".{}")

    def to_run(self) -> Run:
        """The run these fields describe. Raises ConfigError."""
        return self.resolve().run

    @classmethod
    def defaults(cls) -> dict[str, Any]:
        """Every field that has a default, with it."""
        plain = {item.name: item.default for item in fields(cls) if item.default is not MISSING}
        return plain | {item.name: item.default_factory() for item in fields(cls) if item.default_factory is not MISSING}
