"""Derived settings: a null setting gets the value that follows from the others, with the reason."""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec

from shoal.config.layers import Settings, UnavailableError
from shoal.config.schema.model import Model
from shoal.config.schema.strategy import Strategy
from shoal.config.schema.task import TEXT, Task
from shoal.config.schema.updates import Aggregation, NearestNeighbours

Step = Callable[[Settings], None]
_STEPS: list[Step] = []
USER_KINDS = ("live", "factory")
"""Kinds of models and data that the user's program provides."""


def derive(settings: Settings) -> None:
    """Fill in all derived settings. A step is skipped if a setting that it reads is invalid; that was reported already."""
    for step in _STEPS:
        try:
            step(settings)
        except UnavailableError:
            continue


def _step(function: Step) -> Step:
    _STEPS.append(function)
    return function


def withstands(rule: str) -> tuple[int, int] | None:
    """(a, b) if the rule, or the mixing before it, needs a·f + b contributions to withstand f false ones; None if it has no such bound."""
    return Aggregation.kinds.get(rule, NearestNeighbours).withstands


def quorum(rule: str, byzantine: int, bucket: int = 1) -> int:
    """Contributions that a rule needs to withstand `byzantine` false ones. With buckets, the last one may hold a single contribution."""
    factor, more = withstands(rule) or (0, 1)
    return bucket * (factor * byzantine + more - 1) + 1


def tolerated(rule: str, count: int, bucket: int = 1) -> int:
    """False contributions among `count` that a rule withstands; negative if `count` is too small even without any."""
    factor, more = withstands(rule) or (0, 1)
    return (-(-count // bucket) - more) // max(1, factor)


def default_byzantine(rule: str, count: int, bucket: int = 1) -> int:
    """Default of f: a quarter of the contributions, or as many as the rule withstands."""
    return max(0, min(count // 4, tolerated(rule, count, bucket)))


def formula(rule: str, bucket: int = 1) -> str:
    """The number of contributions that a rule needs, as a formula."""
    factor, more = withstands(rule) or (0, 1)
    return f"{factor}f+{more}" if bucket == 1 else f"{bucket}({factor}f+{more - 1})+1"


def bucket_size(settings: Settings) -> int:
    """Contributions per bucket; 1 without bucketing."""
    return settings.get("updates.mixing.size") if settings.get("updates.mixing.kind") == "bucketing" else 1


def workers_needed(settings: Settings) -> int:
    """Different workers whose contributions the aggregation rule needs; 1 if the rule needs none to compare."""
    try:
        byzantine = settings.get("updates.aggregation.byzantine") or 0
    except UnavailableError:
        return 1
    return quorum(settings.get("updates.aggregation.kind"), byzantine, bucket_size(settings))


def contributions(settings: Settings) -> tuple[int | None, str]:
    """The number of contributions per update, and the setting that determines it."""
    strategy: type[Strategy] = Strategy.kinds[settings.get("strategy.kind")]
    averaged = settings.get("updates.aggregation.kind") == "mean" and settings.get("updates.mixing.kind") == "none"
    if strategy.update_from == "strategy.kind" or (strategy.mean_of_one and averaged):
        return 1, "strategy.kind"
    return settings.get(strategy.update_from), strategy.update_from


def is_language(settings: Settings) -> bool:
    """Whether the run's task learns from text."""
    return Task.kinds[settings.get("task.kind")].needs in TEXT


@_step
def task(settings: Settings) -> None:
    if settings.get("task") is None and ("task",) not in settings.kinds:
        kind = settings.get("model.kind")
        if settings.get("rlhf") is not None:
            settings.kinds["task",], because = "ppo", "there is an rlhf section"
        elif kind in USER_KINDS:
            settings.kinds["task",], because = _task_of_data(settings)
        elif Model.kinds[kind].learns:
            settings.kinds["task",], because = Model.kinds[kind].learns[0], f"what a model of kind {kind} is for"
        else:
            return
        settings.derive("task.kind", settings.kinds["task",], because)


def _task_of_data(settings: Settings) -> tuple[str, str]:
    """The task of a user's model on data that the settings describe, and why."""
    kind = settings.get("data.source.kind") if ("data", "source") in settings.kinds else "live"
    if kind in USER_KINDS:
        return "custom", "the data is one's own"
    name = settings.get("data.source.name") if kind == "builtin" else kind
    return ("classification" if name in ("digits", "mnist", "images") else "language-modelling"), f"data.source is {name}"


@_step
def source(settings: Settings) -> None:
    if settings.get("data.source") is None and ("data", "source") not in settings.kinds:
        name = "python-source" if is_language(settings) else "digits"
        settings.kinds["data", "source"] = "builtin"
        settings.derive("data.source.kind", "builtin", "no data.source is given")
        settings.derive("data.source.name", name, f"built-in data for {settings.get('task.kind')}")


@_step
def cadence(settings: Settings) -> None:
    inner = settings.get("strategy.inner_steps") if settings.get("strategy.kind") == "diloco" else None
    for section, steps in (("evaluation", 500), ("checkpoint", 1000)):
        given = settings.get(f"{section}.every_steps") is not None
        if settings.get(f"{section}.strategy") is None:
            why = f"{section}.every_steps is given" if given else "once a round" if inner else f"{section}.every_steps is not given"
            settings.derive(f"{section}.strategy", "steps" if given or inner else "epoch", why)
        if not given:
            settings.derive(f"{section}.every_steps", inner or steps, "once a round" if inner else "not given")


@_step
def sequence_length(settings: Settings) -> None:
    if is_language(settings) and settings.get("data.sequence_length") is None:
        try:
            longest = settings.get("model.max_seq_len")
        except UnavailableError:
            return settings.derive("data.sequence_length", 128, "the model sets no limit")
        settings.derive("data.sequence_length", longest, "as long as model.max_seq_len")


@_step
def batch_size(settings: Settings) -> None:
    if settings.get("training.batch_size") is None:
        if not is_language(settings):
            settings.derive("training.batch_size", 32, "not given")
        elif (length := settings.get("data.sequence_length")) <= 128:
            settings.derive("training.batch_size", 32, f"sequences of {length} tokens, at most 128")
        else:
            settings.derive("training.batch_size", 16, f"sequences of {length} tokens, more than 128")
    if settings.get("evaluation.batch_size") is None:
        settings.derive("evaluation.batch_size", settings.get("training.batch_size"), "as training.batch_size")


@_step
def length_of_run(settings: Settings) -> None:
    if settings.get("training.max_steps") is not None and settings.in_earlier_layer("training.epochs", "training.max_steps"):
        settings.derive("training.epochs", None, "a later layer says the number of steps: training.max_steps")
    if settings.get("strategy.kind") == "diloco":
        _rounds(settings)
    if settings.get("training.epochs") is None and settings.get("training.max_steps") is None:
        kind = settings.get("data.source.kind")
        epochs = {"wikitext": 30, "snli": 20}.get(kind, 1)
        settings.derive("training.epochs", epochs, f"{kind} data, and no max_steps")


def _rounds(settings: Settings) -> None:
    """Derive rounds from steps or steps from rounds. If epochs are given, the run derives both when it has read the data."""
    inner, steps = settings.get("strategy.inner_steps"), settings.get("training.max_steps")
    if settings.get("strategy.rounds") is None and steps is not None:
        settings.derive("strategy.rounds", -(-steps // inner), "training.max_steps / strategy.inner_steps")
    elif settings.get("strategy.rounds") is None and settings.get("training.epochs") is None:
        settings.derive("strategy.rounds", 10, "neither training.max_steps nor training.epochs is given")
    if steps is None and settings.get("strategy.rounds") is not None:
        settings.derive("training.max_steps", settings.get("strategy.rounds") * inner, "strategy.rounds × strategy.inner_steps")


@_step
def seeds_and_names(settings: Settings) -> None:
    if settings.get("data.shuffle_seed") is None:
        settings.derive("data.shuffle_seed", settings.get("seed"), "as seed")
    if is_language(settings) and settings.get("data.tokenizer") is None:
        if settings.get("model.kind") == "huggingface":
            settings.derive("data.tokenizer", settings.get("model.pretrained"), "the model's own")
        else:
            settings.derive("data.tokenizer", "bytes", "not given")


@_step
def number_of_workers(settings: Settings) -> None:
    listed = settings.get("cluster.workers")
    if settings.get("cluster.num_workers") is None and listed:
        settings.derive("cluster.num_workers", len(listed), "workers listed")


@_step
def tasks_want_a_scheduler(settings: Settings) -> None:
    if settings.get("scheduler.tasks") and not settings.given("scheduler.kind"):
        settings.derive("scheduler.kind", "gale-shapley", "tasks are listed")


@_step
def port_of_server(settings: Settings) -> None:
    """If hosts have own ports for the server, the server listens on the one in its own entry."""
    server = settings.get("cluster.server")
    host = settings.get("cluster.hosts").get(server)
    if host is not None and host.server_port is not None and not settings.given("transport.port"):
        settings.derive("transport.port", host.server_port, f"the port of the server, {server}")


@_step
def wandb_is_missing(settings: Settings) -> None:
    """smolcluster files that name a project or ask for gradient norms log to W&B; without the package that is only a warning."""
    paths = ("logging.project", "logging.track_gradients")
    asked = [path for path in paths if settings.get(path) and _is_of(settings, path, "smolcluster")]
    if asked and not settings.given("logging.sinks") and find_spec("wandb") is None:
        message = f"`{settings.spelling(asked[0])}` is meant for W&B, which is not installed: the run's metrics.jsonl has the figures"
        settings.report("wandb", message, asked[0], severity="warning", help="pip install 'shoal[wandb]'")


def _is_of(settings: Settings, path: str, dialect: str) -> bool:
    """Whether a file of this dialect set the setting."""
    assignment = settings.last(tuple(path.split(".")))
    return assignment is not None and assignment.layer.dialect == dialect


@_step
def port_of_database(settings: Settings) -> None:
    if settings.get("transport.kind") == "postgres" and settings.get("transport.port") is None:
        embedded = settings.get("transport.host") == "embedded"
        why = "a free one: the server is the run's own" if embedded else "the usual port of PostgreSQL"
        settings.derive("transport.port", 0 if embedded else 5432, why)


@_step
def least_staleness(settings: Settings) -> None:
    if settings.get("strategy.kind") == "async" and settings.get("strategy.min_staleness") is None:
        settings.derive("strategy.min_staleness", min(5, settings.get("strategy.max_staleness")), "5, or max_staleness if that is less")


@_step
def looking_ahead(settings: Settings) -> None:
    if settings.get("strategy.kind") == "edp" and settings.get("strategy.look_ahead") is None:
        settings.derive("strategy.look_ahead", settings.get("strategy.pull_every_steps") == 1, "where workers pull at every step")


@_step
def byzantine(settings: Settings) -> None:
    count, _ = contributions(settings)
    rule = settings.get("updates.aggregation.kind")
    if count is None:
        return
    counts = withstands(rule) is not None
    if counts and settings.get("updates.aggregation.byzantine") is None:
        number = default_byzantine(rule, count, bucket_size(settings))
        why = f"a quarter of {count} contributions" if number == count // 4 else f"what {rule} withstands among {count} contributions"
        settings.derive("updates.aggregation.byzantine", number, why)
    if settings.get("updates.mixing.kind") == "nearest-neighbours" and settings.get("updates.mixing.byzantine") is None:
        own = settings.get("updates.aggregation.byzantine") if counts else default_byzantine("nearest-neighbours", count)
        settings.derive("updates.mixing.byzantine", own, "as for the rule" if counts else f"a quarter of {count} contributions")


@_step
def robust_round(settings: Settings) -> None:
    """Krum and Bulyan need enough contributions: a dialect file that asks for fewer gets more, with a warning."""
    rule = settings.get("updates.aggregation.kind")
    count, path = contributions(settings)
    if withstands(rule) is None or count is None:
        return
    byzantine = settings.get("updates.aggregation.byzantine")
    needed = quorum(rule, byzantine, bucket_size(settings))
    assignment = settings.last(("updates", "aggregation", "byzantine"))
    if count >= needed or path != "strategy.contributions_per_update" or not assignment or assignment.layer.dialect != "dist-llm-train":
        return
    message = f"{rule} against {byzantine} false contributions needs {needed} of them, not {count}: a round is raised to {needed}"
    settings.report("quorum", message, path, "updates.aggregation.byzantine", severity="warning")
    settings.derive(path, needed, f"{rule} with f = {byzantine} needs it")


@_step
def memory_of_workers(settings: Settings) -> None:
    if settings.get("updates.memory") is None:
        sparse = settings.get("updates.codec").sparse and settings.get("updates.aggregation.kind") != "mean"
        settings.derive(
            "updates.memory", 0.9 if sparse else 0.0, "sparse updates hardly overlap" if sparse else "updates are dense, or averaged"
        )


@_step
def accumulation_of_global_batch(settings: Settings) -> None:
    """A layer that sets the global batch overrides an earlier layer's accumulation, which then follows from the batch sizes."""
    whole, batch, given = (settings.get(f"training.{name}") for name in ("global_batch_size", "batch_size", "gradient_accumulation_steps"))
    path, rank = "training.gradient_accumulation_steps", settings.rank("training.global_batch_size")
    if whole is None or batch is None or settings.get("strategy.kind") != "local":
        return
    devices = settings.devices()
    fits = whole == batch * given * devices if devices else whole % (batch * given) == 0
    share = batch * (devices or 1)
    if fits or whole % share or not settings.rank(path) < rank <= settings.rank("training.batch_size"):
        return
    follows = f"{whole} / ({batch} × {devices or 'the number of'} devices)" + (f" = {whole // share}" if devices else "")
    if settings.given(path):
        message = f"a global batch of {whole} does not fit {batch} × {given} × {devices or 'any number of'} devices"
        why = f"{message}; the later layer counts, and `{settings.spelling(path)}` follows from it: {follows}"
        settings.report("batch-arithmetic", why, "training.global_batch_size", "training.batch_size", path, severity="warning")
    settings.derive(path, whole // share, "global_batch_size / (batch_size × devices)")


@_step
def global_batch(settings: Settings) -> None:
    """A later layer that changes a factor of the global batch size overrides it."""
    whole = settings.get("training.global_batch_size")
    if whole is None:
        return
    factors = ("training.batch_size", "training.gradient_accumulation_steps", "launch.devices_per_node", "launch.nodes")
    newer = [path for path in factors if settings.given(path) and settings.rank(path) > settings.rank("training.global_batch_size")]
    batch, accumulation, devices, nodes = (settings.get(path) for path in factors)
    if batch is None:  # it could not be derived, because something else is wrong
        return
    step = batch * accumulation * (devices or 1) * (nodes or 1)
    fits = whole == step if devices else whole % step == 0
    if fits or not newer:
        return
    product = f"{batch} × {accumulation}" + (f" × {devices * (nodes or 1)} devices" if devices else " × the number of devices")
    message = f"a global batch of {whole} does not fit {product} (batch × gradient accumulation × devices); the later layer counts, and "
    message += f"the global batch becomes {step}" if devices else "the global batch follows from it"
    settings.report("batch-arithmetic", message, newer[-1], "training.global_batch_size", severity="warning")
    settings.derive("training.global_batch_size", step if devices else None, "batch_size × gradient_accumulation_steps × devices")
