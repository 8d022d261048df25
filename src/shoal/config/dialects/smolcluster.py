"""smolcluster: a shelf of Macs, Pis and a Windows box; a cluster file and a model file."""

from importlib.util import find_spec
from typing import Any

from shoal.config.dialects.table import Dialect, Implied, RejectError, Row, WrittenKeys, choice, same
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
    if f"{_ENTRY}.num_nodes" in seen:
        implied["serving.spread"] = ("even", f"`{_ENTRY}.num_nodes` nodes hold layers, each of them")
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
        Row("host_ip.*", "cluster.hosts.*.server_address"),
        Row("port", "transport[zmq,xmlrpc].port"),
        Row("port.*", "cluster.hosts.*.server_port"),
        *same("", "cluster.", "num_workers workers server"),
        Row("worker_update_interval", "strategy[edp,syncps].pull_every_steps"),
        Row("use_quantization", "updates.codec.kind", convert=choice({True: "int8", False: "none"})),
        Row("seed", "seed"),
        Row("timeout", "strategy[syncps].round_timeout_s", "engine[pipeline].timeout_s"),
        Row("web_interface.api_port", "serving.api_port"),
        Row("web_interface.frontend_port", "serving.page_port"),
        Row("batch_size", "training.batch_size", also=("training.batch_size",)),
        Row("learning_rate", "training.optimizer.learning_rate", also=("training.learning_rate",)),
        Row("num_epochs", "training.epochs", also=("training.epochs", "epochs")),
        Row("eval_steps", "evaluation.every_steps"),
        Row("track_gradients", "logging.track_gradients"),
        Row("polyak_alpha", "training.polyak_alpha"),
        *same("gradient_clipping.", "training.clipping.", "enabled max_norm"),
        Row("model.type", "model.kind", convert=choice({"SimpleNN": "mlp", "GPT": "gpt"})),
        Row("model.input_dim", "model[mlp].input_dim"),
        Row("model.hidden", "model[mlp].hidden_sizes", convert=_hidden),
        Row("model.out", "model[mlp].output_dim"),
        Row("dataset.name", "data.source.kind", convert=choice({"MNIST": "mnist", "WikiText": "wikitext", "SNLI": "snli"})),
        Row("model.model_dim", f"{_GPT}.hidden_size", also=("model_dim",)),
        Row("model.num_layers", "model[gpt,huggingface].num_layers", also=("num_layers",)),
        Row("model.num_heads", f"{_GPT}.num_heads", also=("num_heads",)),
        Row("model.ff_dim", f"{_GPT}.intermediate_size", also=("ff_dim",)),
        Row("model.dropout", f"{_GPT}.dropout", also=("dropout",)),
        Row("model.max_seq_len", f"{_GPT}.max_seq_len", also=("max_seq_len",)),
        Row("training.weight_decay", "training.optimizer.weight_decay", also=("weight_decay",)),
        Row("training.grad_clip_norm", "training.clipping.max_norm", also=("grad_clip_norm",)),
        Row("lr_schedule.warmup_iters", "training.schedule.warmup_steps", also=("warmup_iters",)),
        Row("lr_schedule.min_lr", "training.schedule.end_learning_rate", also=("min_lr",)),
        Row("data.tokenizer", "data.tokenizer", also=("tokenizer",)),
        Row("logging.project_name", "logging.project", also=("project_name",)),
        Row(f"{_ENTRY}.hf_model_name", f"{_PRETRAINED}.pretrained"),
        Row(f"{_ENTRY}.weights_model_name", f"{_PRETRAINED}.weights"),
        Row(f"{_ENTRY}.num_nodes", "serving.num_nodes"),
        Row(f"{_ENTRY}.num_layers", f"{_PRETRAINED}.num_layers"),
        Row(f"{_ENTRY}.max_new_tokens", "serving.max_new_tokens"),
        Row(f"{_ENTRY}.active_decoding_strategy", "serving.decoding.active"),
        *same(f"{_ENTRY}.decoding_strategies.", "serving.decoding.", "greedy.temperature sampling.temperature top_p.temperature top_p.p"),
        *same(f"{_ENTRY}.decoding_strategies.", "serving.decoding.", "top_k.temperature top_k.k"),
        *same(f"{_ENTRY}.decoding_strategies.top_k_top_p.", "serving.decoding.top_k_top_p.", "temperature k p"),
    ),
    _imply,
)
