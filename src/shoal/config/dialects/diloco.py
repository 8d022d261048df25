"""diloco: fine-tune Hugging Face models with DiLoCo over FSDP; the fields of `TrainerConfig`."""

from typing import Any

from shoal.config.dialects.table import Dialect, Implied, RejectError, Row, WrittenKeys, choice, same
from shoal.config.text import describe

_MODEL = "model[huggingface]"
_DATA = "data.source[huggingface]"
_DILOCO = "strategy[diloco]"


def _every(value: Any) -> Any:
    """Every N steps; 0 means never."""
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise RejectError(f"expected a whole number at least 0, found {describe(value)}")
    return {"strategy": "steps", "every_steps": value} if value else {"strategy": "never"}


def _sinks(value: Any) -> Any:
    return [choice({"tensorboard": "tensorboard", "wandb": "wandb"})(value)]


def _imply(seen: WrittenKeys) -> Implied:
    why = "diloco files fine-tune a Hugging Face model with DiLoCo over FSDP"
    return {
        "strategy.kind": ("diloco", why),
        "engine.kind": ("fsdp", why),
        "model.kind": ("huggingface", why),
        "data.source.kind": ("huggingface", why),
        "data.streaming": (True, "diloco files stream their data"),
    }


DILOCO = Dialect(
    "diloco",
    "Fine-tune Hugging Face models on islands of GPUs",
    (
        Row("model_name", f"{_MODEL}.pretrained"),
        Row("dataset_name", f"{_DATA}.name"),
        *same("", f"{_DATA}.", "subset text_field"),
        Row("output_dir", "output_dir"),
        Row("seq_len", "data.sequence_length", default=1024),
        Row("batch_size", "training.batch_size", default=1),
        Row("grad_accum", "training.gradient_accumulation_steps"),
        Row("dynamic_batch", "data.batching", convert=choice({True: "dynamic", False: "padded"}), default=False),
        Row("lr", "training.optimizer.learning_rate", default=1e-5),
        Row("outer_lr", f"{_DILOCO}.outer.learning_rate"),
        Row("outer_momentum", f"{_DILOCO}.outer.momentum"),
        Row(
            "outer_lr_schedule",
            f"{_DILOCO}.outer_schedule",
            convert=choice({"cosine": "cosine", "linear": "linear", "polynomial": "polynomial", "None": "constant"}),
            null="constant",
        ),
        Row("max_steps", f"{_DILOCO}.inner_steps"),
        Row("diloco_loops", f"{_DILOCO}.rounds"),
        Row("inner_opt", "training.optimizer.name"),
        Row("inner_opt_kwargs", "training.optimizer.kwargs"),
        Row("outer_opt", f"{_DILOCO}.outer.name"),
        Row("outer_opt_kwargs", f"{_DILOCO}.outer.kwargs"),
        Row("outer_grad_clip", f"{_DILOCO}.outer_clip_norm"),
        Row("checkpoint_steps", "checkpoint", convert=_every, default=0),
        Row("resume_from", "checkpoint.resume_from"),
        Row("log_with", "logging.sinks", convert=_sinks, null=[]),
        Row("log_dir", "logging.directory"),
        Row("eval_batches", "evaluation.batches", default=0),
        Row("num_workers", "data.loader.num_workers"),
        Row("seed", "seed"),
        Row("shuffle_buffer", "data.shuffle_buffer"),
    ),
    _imply,
)
