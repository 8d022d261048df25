"""diloco: fine-tune Hugging Face models with DiLoCo over FSDP; the fields of `TrainerConfig`."""

from typing import Any

from shoal.config.dialects.table import Dialect, Implied, RejectError, WrittenKeys, choice, row
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
        row("model_name", f"{_MODEL}.pretrained"),
        row("dataset_name", f"{_DATA}.name"),
        row("subset", f"{_DATA}.subset"),
        row("output_dir", "output_dir"),
        row("text_field", f"{_DATA}.text_field"),
        row("seq_len", "data.sequence_length", default=1024),
        row("batch_size", "training.batch_size", default=1),
        row("grad_accum", "training.gradient_accumulation_steps"),
        row("dynamic_batch", "data.batching", convert=choice({True: "dynamic", False: "padded"}), default=False),
        row("lr", "training.optimizer.learning_rate", default=1e-5),
        row("outer_lr", f"{_DILOCO}.outer.learning_rate"),
        row("outer_momentum", f"{_DILOCO}.outer.momentum"),
        row(
            "outer_lr_schedule",
            f"{_DILOCO}.outer_schedule",
            convert=choice({"cosine": "cosine", "linear": "linear", "polynomial": "polynomial", "None": "constant"}),
        ),
        row("max_steps", f"{_DILOCO}.inner_steps"),
        row("diloco_loops", f"{_DILOCO}.rounds"),
        row("inner_opt", "training.optimizer.name"),
        row("inner_opt_kwargs", "training.optimizer.kwargs"),
        row("outer_opt", f"{_DILOCO}.outer.name"),
        row("outer_opt_kwargs", f"{_DILOCO}.outer.kwargs"),
        row("outer_grad_clip", f"{_DILOCO}.outer_clip_norm"),
        row("checkpoint_steps", "checkpoint", convert=_every, default=0),
        row("resume_from", "checkpoint.resume_from"),
        row("log_with", "logging.sinks", convert=_sinks),
        row("log_dir", "logging.directory"),
        row("eval_batches", "evaluation.batches", default=0),
        row("num_workers", "data.loader.num_workers"),
        row("seed", "seed"),
        row("shuffle_buffer", "data.shuffle_buffer"),
    ),
    _imply,
)
