"""dist-llm-train: volunteers across a WAN, bounded staleness, compression, robust aggregation, scheduling."""

from shoal.config.dialects.table import Dialect, Implied, Row, WrittenKeys, choice, off_at, same

_NET = "transport[zmq,xmlrpc]"
_ASYNC = "strategy[async]"
_SYNC = "strategy[syncps]"
_MODE = choice({True: "async", False: "syncps"})

MODELS = {
    "tiny-lstm": {"kind": "lstm", "hidden_size": 64, "num_layers": 1},
    "small-lstm": {"kind": "lstm", "hidden_size": 256, "num_layers": 2},
    "tiny-transformer": {"kind": "gpt", "hidden_size": 64, "num_layers": 2, "num_heads": 2, "max_seq_len": 256},
    "small-transformer": {"kind": "gpt", "hidden_size": 256, "num_layers": 4, "num_heads": 4, "max_seq_len": 512},
}


def _imply(seen: WrittenKeys) -> Implied:
    unsaid = "training.num_workers" not in seen and "workers[].name" not in seen
    workers: Implied = {"cluster.num_workers": (2, "default of `training.num_workers` in dist-llm-train files")} if unsaid else {}
    if "training.text_file" in seen:
        data: Implied = {"data.source.kind": ("text", "`training.text_file` names a file")}
    else:
        data = {
            "data.source.kind": ("builtin", "the file names no text: the built-in one"),
            "data.source.name": ("python-source", "the file names no text: the built-in one"),
        }
    always: Implied = {
        f"{_ASYNC}.look_ahead": (False, "dist-llm-train's workers compute on the weights they pulled"),
        "training.optimizer.name": ("SGD", "the optimizer of dist-llm-train files"),
    }
    return always | workers | data


DIST_LLM_TRAIN = Dialect(
    "dist-llm-train",
    "Volunteers across a WAN",
    (
        *same("controller.", f"{_NET}.", "host port"),
        Row("controller.scheduler", "scheduler.kind"),
        Row("controller.use_async_training", "strategy.kind", convert=_MODE, default=True),
        *same("controller.", f"{_ASYNC}.", "max_staleness min_staleness max_staleness_multiplier"),
        Row("controller.adaptive_staleness", f"{_ASYNC}.adaptive"),
        Row("controller.use_zmq", "transport.kind", convert=choice({True: "zmq", False: "xmlrpc"})),
        Row("controller.gradient_accumulation_size", f"{_ASYNC}.contributions_per_update", default=3),
        Row("controller.gradient_clip_norm", "updates.clip_norm", convert=off_at(0), default=1.0),
        Row("controller.enable_differential_privacy", "updates.privacy.enabled"),
        Row("controller.dp_noise_multiplier", "updates.privacy.noise_multiplier", default=0.1),
        Row("workers[].name", "cluster.workers[]"),
        Row("workers[].memory", "cluster.hosts.{name}.memory_gb"),
        Row("workers[].flops_per_second", "cluster.hosts.{name}.flops"),
        Row("workers[].network_bandwidth", "cluster.hosts.{name}.bandwidth_mbps"),
        *same("workers[].", "cluster.hosts.{name}.", "host port"),
        Row("model.name", "model", convert=choice(MODELS)),
        Row("training.learning_rate", "training.optimizer.learning_rate"),
        Row("training.batch_size", "training.batch_size", default=8),
        Row("training.num_epochs", "training.epochs", default=1),
        Row("training.num_samples", "data.max_samples", default=100),
        Row("training.seq_length", "data.sequence_length", default=32),
        Row("training.text_file", "data.source[text].path"),
        Row("training.num_workers", "cluster.num_workers"),
        Row("training.use_async_training", "strategy.kind", convert=_MODE, yields_to="controller.use_async_training"),
        Row("training.max_staleness", f"{_ASYNC}.max_staleness", yields_to="controller.max_staleness"),
        Row(
            "training.compression",
            "updates.codec.kind",
            convert=choice({"topk": "topk", "quantize": "int8", "fp16": "fp16", "none": "none"}),
        ),
        Row("training.compression_ratio", "updates.codec[topk].ratio"),
        Row(
            "training.aggregation_rule",
            "updates.aggregation.kind",
            convert=choice({"mean": "mean", "trimmed_mean": "trimmed-mean", "krum": "krum", "bulyan": "bulyan"}),
        ),
        Row("training.trim_ratio", "updates.aggregation[trimmed-mean].trim_ratio"),
        Row("training.krum_f", "updates.aggregation[krum].byzantine"),
        Row("training.bulyan_f", "updates.aggregation[bulyan].byzantine"),
        Row("training.sync_window", f"{_SYNC}.window"),
        Row("training.sync_max_wait_s", f"{_SYNC}.round_timeout_s"),
        *same("tasks[].", "scheduler.tasks[].", "id required_flops priority"),
        Row("tasks[].model_shard_size", "scheduler.tasks[].model_share"),
        Row("tasks[].data_size", "scheduler.tasks[].data_share"),
        Row("simulation.heartbeat_cycles", "simulation.heartbeats"),
        Row("simulation.heartbeat_interval", "simulation.heartbeat_interval_s"),
        Row("simulation.scheduling_cycles", "simulation.scheduling_rounds"),
        Row("simulation.scheduling_interval", "simulation.scheduling_interval_s", "scheduler.interval_s"),
        Row("state_db", "coordinator.state_path"),
        Row("ps_checkpoint", "coordinator.checkpoint_path"),
    ),
    _imply,
)
