"""dist-llm-train: volunteers across a WAN, bounded staleness, compression, robust aggregation, scheduling."""

from shoal.config.dialects.table import Dialect, Implied, WrittenKeys, choice, off_at, row

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
    text = ("builtin", "dist-llm-train files name no data set: the built-in text")
    return workers | {
        f"{_ASYNC}.look_ahead": (False, "dist-llm-train's workers compute on the weights they pulled"),
        "training.optimizer.name": ("SGD", "the optimizer of dist-llm-train files"),
        "data.source.kind": text,
        "data.source.name": ("python-source", text[1]),
    }


DIST_LLM_TRAIN = Dialect(
    "dist-llm-train",
    "Volunteers across a WAN",
    (
        row("controller.host", f"{_NET}.host"),
        row("controller.port", f"{_NET}.port"),
        row("controller.scheduler", "scheduler.kind"),
        row("controller.use_async_training", "strategy.kind", convert=_MODE, default=True),
        row("controller.max_staleness", f"{_ASYNC}.max_staleness"),
        row("controller.adaptive_staleness", f"{_ASYNC}.adaptive"),
        row("controller.min_staleness", f"{_ASYNC}.min_staleness"),
        row("controller.max_staleness_multiplier", f"{_ASYNC}.max_staleness_multiplier"),
        row("controller.use_zmq", "transport.kind", convert=choice({True: "zmq", False: "xmlrpc"})),
        row("controller.gradient_accumulation_size", f"{_ASYNC}.contributions_per_update", default=3),
        row("controller.gradient_clip_norm", "updates.clip_norm", convert=off_at(0), default=1.0),
        row("controller.enable_differential_privacy", "updates.privacy.enabled"),
        row("controller.dp_noise_multiplier", "updates.privacy.noise_multiplier", default=0.1),
        row("workers[].name", "cluster.workers[]"),
        row("workers[].memory", "cluster.hosts.{name}.memory_gb"),
        row("workers[].flops_per_second", "cluster.hosts.{name}.flops"),
        row("workers[].network_bandwidth", "cluster.hosts.{name}.bandwidth_mbps"),
        row("workers[].host", "cluster.hosts.{name}.host"),
        row("workers[].port", "cluster.hosts.{name}.port"),
        row("model.name", "model", convert=choice(MODELS)),
        row("training.learning_rate", "training.optimizer.learning_rate"),
        row("training.batch_size", "training.batch_size", default=8),
        row("training.num_epochs", "training.epochs", default=1),
        row("training.num_samples", "data.max_samples", default=100),
        row("training.seq_length", "data.sequence_length", default=32),
        row("training.num_workers", "cluster.num_workers"),
        row("training.use_async_training", "strategy.kind", convert=_MODE, yields_to="controller.use_async_training"),
        row("training.max_staleness", f"{_ASYNC}.max_staleness", yields_to="controller.max_staleness"),
        row(
            "training.compression",
            "updates.codec.kind",
            convert=choice({"topk": "topk", "quantize": "int8", "fp16": "fp16", "none": "none"}),
        ),
        row("training.compression_ratio", "updates.codec[topk].ratio"),
        row(
            "training.aggregation_rule",
            "updates.aggregation.kind",
            convert=choice({"mean": "mean", "trimmed_mean": "trimmed-mean", "krum": "krum", "bulyan": "bulyan"}),
        ),
        row("training.trim_ratio", "updates.aggregation[trimmed-mean].trim_ratio"),
        row("training.krum_f", "updates.aggregation[krum].byzantine"),
        row("training.bulyan_f", "updates.aggregation[bulyan].byzantine"),
        row("training.sync_window", f"{_SYNC}.window"),
        row("training.sync_max_wait_s", f"{_SYNC}.round_timeout_s"),
        row("tasks[].id", "scheduler.tasks[].id"),
        row("tasks[].model_shard_size", "scheduler.tasks[].model_share"),
        row("tasks[].data_size", "scheduler.tasks[].data_share"),
        row("tasks[].required_flops", "scheduler.tasks[].required_flops"),
        row("tasks[].priority", "scheduler.tasks[].priority"),
        row("simulation.heartbeat_cycles", "simulation.heartbeats"),
        row("simulation.heartbeat_interval", "simulation.heartbeat_interval_s"),
        row("simulation.scheduling_cycles", "simulation.scheduling_rounds"),
        row("simulation.scheduling_interval", "simulation.scheduling_interval_s"),
        row("state_db", "coordinator.state_path"),
        row("ps_checkpoint", "coordinator.checkpoint_path"),
    ),
    _imply,
)
