"""smolcluster: a shelf of Macs, Pis and a Windows box; a cluster file and a model file."""

from importlib.util import find_spec
from typing import Any

from shoal.config.dialects.table import Dialect, DialectRow, Implied, RejectError, WrittenKeys, choice, row
from shoal.config.text import describe

_GPT = "model[gpt]"
_PRETRAINED = "model[huggingface]"
_ENTRY = "causal_gpt2"


def _hidden(value: Any) -> Any:
    """`hidden` is the width of SimpleNN's two hidden layers, or a list with a width for each layer."""
    if isinstance(value, list):
        return value
    if isinstance(value, bool) or not isinstance(value, int):
        raise RejectError(f"expected a whole number at least 1, found {describe(value)}")
    return [value, value]


def _decoding(name: str, *keys: str) -> tuple[DialectRow, ...]:
    return tuple(row(f"{_ENTRY}.decoding_strategies.{name}.{key}", f"serving.decoding.{name}.{key}") for key in keys)


def _imply(seen: WrittenKeys) -> Implied:
    """The algorithm, which smolcluster chooses by file name, follows from the keys."""
    implied: Implied = {
        "transport.kind": ("zmq", "smolcluster files use sockets"),
        "strategy[edp].look_ahead": (False, "smolcluster's workers compute on the weights they have"),
    }
    if "worker_update_interval" in seen:
        kind, why = (
            ("syncps", "`worker_update_interval` with `timeout`")
            if "timeout" in seen
            else ("edp", "`worker_update_interval` without `timeout`")
        )
        implied["strategy.kind"] = (kind, why)
    elif "workers" in seen:
        implied["engine.kind"] = ("pipeline", "a cluster without `worker_update_interval` shares the layers of one model")
    if "lr_schedule.warmup_iters" in seen or "lr_schedule.min_lr" in seen:
        implied["training.schedule.kind"] = ("cosine", "`lr_schedule` goes down to `min_lr`, as a GPT's does")
    if ("logging.project_name" in seen or seen.value("track_gradients") is True) and find_spec("wandb") is not None:
        implied["logging.sinks"] = (["wandb"], "smolcluster files log a named project, or gradient norms, to W&B")
    if seen.any_below("web_interface") and "timeout" in seen:
        implied["serving.request_timeout_s"] = (seen.value("timeout"), "`timeout` of a cluster with a `web_interface` is a request's")
    if f"{_ENTRY}.hf_model_name" in seen:
        implied["model.kind"] = ("huggingface", f"`{_ENTRY}` names a pretrained model")
    elif any(f"model.{key}" in seen for key in ("model_dim", "num_layers", "num_heads", "ff_dim", "max_seq_len", "dropout")):
        implied["model.kind"] = ("gpt", "the model's keys are a GPT's")
        implied["data.source.kind"] = ("wikitext", "the data set of GPT files")
    elif any(f"model.{key}" in seen for key in ("input_dim", "hidden", "out")):
        implied["model.kind"] = ("mlp", "the model's keys are a SimpleNN's")
    return implied


SMOLCLUSTER = Dialect(
    "smolcluster",
    "A shelf of machines of every kind",
    (
        row("host_ip.*", "cluster.hosts.*.server_address"),
        row("port", "transport[zmq,xmlrpc].port"),
        row("port.*", "cluster.hosts.*.server_port"),
        row("num_workers", "cluster.num_workers"),
        row("workers", "cluster.workers"),
        row("server", "cluster.server"),
        row("worker_update_interval", "strategy[edp,syncps].pull_every_steps"),
        row("use_quantization", "updates.codec.kind", convert=choice({True: "int8", False: "none"})),
        row("seed", "seed"),
        row("timeout", "strategy[syncps].round_timeout_s", "engine[pipeline].timeout_s"),
        row("web_interface.api_port", "serving.api_port"),
        row("web_interface.frontend_port", "serving.page_port"),
        row("batch_size", "training.batch_size", also=("training.batch_size",)),
        row("learning_rate", "training.optimizer.learning_rate", also=("training.learning_rate",)),
        row("num_epochs", "training.epochs", also=("training.epochs", "epochs")),
        row("eval_steps", "evaluation.every_steps"),
        row("track_gradients", "logging.track_gradients"),
        row("polyak_alpha", "training.polyak_alpha"),
        row("gradient_clipping.enabled", "training.clipping.enabled"),
        row("gradient_clipping.max_norm", "training.clipping.max_norm"),
        row("model.type", "model.kind", convert=choice({"SimpleNN": "mlp", "GPT": "gpt"})),
        row("model.input_dim", "model[mlp].input_dim"),
        row("model.hidden", "model[mlp].hidden_sizes", convert=_hidden),
        row("model.out", "model[mlp].output_dim"),
        row("dataset.name", "data.source.kind", convert=choice({"MNIST": "mnist", "WikiText": "wikitext", "SNLI": "snli"})),
        row("model.model_dim", f"{_GPT}.hidden_size", also=("model_dim",)),
        row("model.num_layers", "model[gpt,huggingface].num_layers", also=("num_layers",)),
        row("model.num_heads", f"{_GPT}.num_heads", also=("num_heads",)),
        row("model.ff_dim", f"{_GPT}.intermediate_size", also=("ff_dim",)),
        row("model.dropout", f"{_GPT}.dropout", also=("dropout",)),
        row("model.max_seq_len", f"{_GPT}.max_seq_len", also=("max_seq_len",)),
        row("training.weight_decay", "training.optimizer.weight_decay", also=("weight_decay",)),
        row("training.grad_clip_norm", "training.clipping.max_norm", also=("grad_clip_norm",)),
        row("lr_schedule.warmup_iters", "training.schedule.warmup_steps", also=("warmup_iters",)),
        row("lr_schedule.min_lr", "training.schedule.end_learning_rate", also=("min_lr",)),
        row("data.tokenizer", "data.tokenizer", also=("tokenizer",)),
        row("logging.project_name", "logging.project", also=("project_name",)),
        row(f"{_ENTRY}.hf_model_name", f"{_PRETRAINED}.pretrained"),
        row(f"{_ENTRY}.weights_model_name", f"{_PRETRAINED}.weights"),
        row(f"{_ENTRY}.num_nodes", "serving.num_nodes"),
        row(f"{_ENTRY}.num_layers", f"{_PRETRAINED}.num_layers"),
        row(f"{_ENTRY}.max_new_tokens", "serving.max_new_tokens"),
        row(f"{_ENTRY}.active_decoding_strategy", "serving.decoding.active"),
        *_decoding("greedy", "temperature"),
        *_decoding("sampling", "temperature"),
        *_decoding("top_p", "temperature", "p"),
        *_decoding("top_k", "temperature", "k"),
        *_decoding("top_k_top_p", "temperature", "k", "p"),
    ),
    _imply,
)
