"""What must hold between settings. Each rule names the settings it reads, and runs when they are good, whatever else is wrong.

Where the contradiction stands in one layer it is an error; where a later layer brought it into an earlier one (a short test run of a long
config, say) most rules only warn, because the later layer was chosen knowingly.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, NamedTuple

from shoal.config.derive import bucket_size, contributions, formula, quorum, tolerated
from shoal.config.fields import Secret
from shoal.config.layers import Settings, UnavailableError, default_at
from shoal.config.problems import Severity
from shoal.config.schema.data import DataSource
from shoal.config.schema.model import Model
from shoal.config.schema.rlhf import Rlhf, TrainedReward
from shoal.config.schema.strategy import Strategy
from shoal.config.schema.task import TEXT, Task
from shoal.config.schema.training import EMULATED, WHOLE_MATRICES
from shoal.config.schema.updates import Aggregation, Updates


class Rule(NamedTuple):
    """A check over the values at some paths."""

    paths: tuple[str, ...]
    check: Callable[..., None]


RULES: list[Rule] = []
CUT_INTO_STAGES = ("gpt", "moe", "huggingface")
SHARDING = ("fsdp", "deepspeed")
"""Engines that cut matrices into parts of several processes."""


def rule(*paths: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    def register(check: Callable[..., None]) -> Callable[..., None]:
        RULES.append(Rule(paths, check))
        return check

    return register


def apply(settings: Settings) -> None:
    for paths, check in RULES:
        try:
            check(settings, *(settings.get(path) for path in paths))
        except UnavailableError:
            continue


def _across(settings: Settings, *paths: str) -> Severity:
    """An error within a layer, a warning across layers."""
    return "error" if len({settings.rank(path) for path in paths}) == 1 else "warning"


@rule("model.hidden_size", "model.num_heads")
def heads_divide_width(settings: Settings, width: int, heads: int) -> None:
    if width % heads:
        settings.report("heads", f"{heads} attention heads do not divide a width of {width}", "model.num_heads", "model.hidden_size")


@rule("model.num_heads", "model.num_kv_heads")
def kv_heads_divide_heads(settings: Settings, heads: int, kv_heads: int | None) -> None:
    if kv_heads and heads % kv_heads:
        settings.report(
            "heads", f"{kv_heads} key and value heads do not divide {heads} attention heads", "model.num_kv_heads", "model.num_heads"
        )


@rule("model.experts.count", "model.experts.per_token")
def enough_experts(settings: Settings, count: int, per_token: int) -> None:
    if per_token > count:
        message = f"{per_token} experts per token, of {count} experts in all"
        settings.report("experts", message, "model.experts.per_token", "model.experts.count")


@rule("model.experts.router", "model.experts.per_token")
def router_is_causal(settings: Settings, router: str, per_token: int) -> None:
    if router in ("expert-choice", "soft"):
        message = f"the router {router} looks at later tokens of a sequence, and a causal model must not; switch and the others do not"
        settings.report("router", message, "model.experts.router")
    if router == "gshard" and per_token != 2:
        settings.report(
            "router", f"the router gshard chooses 2 experts per token, not {per_token}", "model.experts.per_token", "model.experts.router"
        )


@rule("engine.experts", "model.kind", "strategy.kind")
def only_workers_of_a_mixture_hold_experts(settings: Settings, held: tuple[int, ...] | None, model: str, strategy: str) -> None:
    if held is not None and model != "moe":
        message = f"a model of the kind {model} has no experts: a worker holds all of it"
        settings.report("held", message, "engine.experts", "model.kind", help="set engine.experts to null")
    elif held is not None and strategy == "local":
        message = "a run without other workers needs all of its experts"
        settings.report("held", message, "engine.experts", "strategy.kind", help="set engine.experts to null")


@rule("engine.experts", "model.experts.count", "model.experts.per_token", "model.experts.router")
def held_experts_are_there(settings: Settings, held: tuple[int, ...] | None, count: int, per_token: int, router: str) -> None:
    if held is None:
        return
    if list(held) != sorted(set(held)) or not held or held[-1] >= count:
        message = f"experts are named by numbers from 0 to {count - 1}, each once and in ascending order"
        settings.report("held", message, "engine.experts", "model.experts.count")
    elif len(held) < per_token:
        message = f"each token visits {per_token} experts, and {len(held)} are held"
        settings.report("held", message, "engine.experts", "model.experts.per_token")
    elif router == "hash":
        message = "the router hash sends each token to experts of a fixed table: a worker that lacks some cannot send it to others"
        settings.report("held", message, "engine.experts", "model.experts.router")


@rule("engine.experts", "engine.kind")
def collectives_hold_all_experts(settings: Settings, held: tuple[int, ...] | None, engine: str) -> None:
    if held is not None and engine in ("collectives", "pipeline"):
        message = f"the engine {engine} holds all experts"
        settings.report("held", message, "engine.experts", "engine.kind", help="set engine.experts to null")


@rule("model.experts.router", "updates.privacy.enabled")
def loads_are_private(settings: Settings, router: str, private: bool) -> None:
    if private and router == "sigmoid-bias":
        message = "the router sigmoid-bias reports the experts' loads without noise, which updates.privacy does not account for"
        settings.report("router", message, "model.experts.router", "updates.privacy.enabled")


@rule("data.sequence_length", "model.max_seq_len")
def sequence_fits_model(settings: Settings, length: int | None, longest: int) -> None:
    if length is not None and length > longest:
        message = f"sequences of {length} tokens do not fit a model that takes {longest}"
        settings.report("sequence-length", message, "data.sequence_length", "model.max_seq_len")


@rule("cluster.num_workers", "cluster.workers")
def workers_counted(settings: Settings, number: int | None, workers: tuple[str, ...]) -> None:
    if number is not None and workers and number != len(workers):
        message = f"{number} workers are expected and {len(workers)} are listed"
        settings.report("workers", message, "cluster.num_workers", "cluster.workers", help="make them agree")


@rule("cluster.workers")
def workers_named_once(settings: Settings, workers: tuple[str, ...]) -> None:
    for name in sorted({name for name in workers if workers.count(name) > 1}):
        settings.report("workers", f"worker `{name}` is listed twice", "cluster.workers")


@rule("cluster.server", "cluster.workers", "cluster.hosts")
def hosts_are_known(settings: Settings, server: str | None, workers: tuple[str, ...], hosts: dict[str, Any]) -> None:
    known = ", ".join(f"`{name}`" for name in hosts) or "none"
    if server is not None and server not in hosts:
        message = f"the server `{server}` has no address: the hosts are {known}"
        settings.report("hosts", message, "cluster.server", *_first_host(settings), help=f"add `{server}` to the hosts")
    if server is not None and server in workers:
        settings.report("hosts", f"`{server}` is the server and a worker too", "cluster.workers", "cluster.server")
    missing = [name for name in workers if name not in hosts] if hosts else []
    if missing:
        names = ", ".join(f"`{name}`" for name in missing)
        settings.report(
            "hosts",
            f"no address for the worker{'s' * (len(missing) > 1)} {names}: the hosts are {known}",
            "cluster.workers",
            *_first_host(settings),
        )


def _first_host(settings: Settings) -> tuple[str, ...]:
    return next(((".".join(path),) for path in settings.history if path[:2] == ("cluster", "hosts")), ())


@rule("model.episodic_memory.enabled", "updates.privacy.enabled")
def a_memory_keeps_no_secrets(settings: Settings, remembers: bool, private: bool) -> None:
    if remembers and private:
        message = "an episodic memory keeps and replays whole sequences, which updates.privacy does not account for"
        settings.report("memory", message, "model.episodic_memory.enabled", "updates.privacy.enabled")


@rule("updates.privacy.enabled", "updates.clip_norm")
def privacy_needs_clipping(settings: Settings, private: bool, clip: float | None) -> None:
    if private and clip is None:
        message = "differential privacy needs a limit on each contribution, and clipping is off"
        settings.report(
            "privacy",
            message,
            "updates.privacy.enabled",
            "updates.clip_norm",
            help=f"set `{settings.spelling('updates.clip_norm')}` above 0",
        )


@rule("updates.codec.error_feedback", "updates.codec.error_decay")
def what_fades_is_kept(settings: Settings, kept: bool, decay: float) -> None:
    if decay < 1 and not kept:
        message = "what was left out is to fade, and none of it is kept"
        settings.report("codec", message, "updates.codec.error_decay", "updates.codec.error_feedback", help="leave one of them out")


@rule("updates.aggregation.kind", "updates.aggregation.byzantine")
def robust_quorum(settings: Settings, kind: str, byzantine: int | None) -> None:
    bucket = bucket_size(settings)
    others = ("updates.aggregation.kind",) if bucket == 1 else ("updates.mixing.size", "updates.aggregation.kind")
    _quorum(settings, "updates.aggregation.byzantine", kind, byzantine, bucket, others)


@rule("engine.kind", "strategy.kind")
def replicas_meet_at_the_end_of_a_round(settings: Settings, engine: str, strategy: str) -> None:
    """In between each process has weights of its own, which nobody may ask for or replace."""
    if engine != "collectives":
        return
    if strategy != "diloco":
        message = f"the processes of the engine collectives step by themselves between the rounds of diloco, and the strategy is {strategy}"
        settings.report("engine", message, "engine.kind", "strategy.kind", help="set strategy.kind to diloco, or engine.kind to ddp")
        return
    for path, only in (("strategy.fragments", 1), ("strategy.overlap_steps", 0)):
        if settings.get(path) != only:
            message = f"the engine collectives averages whole models between rounds: `{settings.spelling(path)}` would have to be {only}"
            settings.report("engine", message, path, "engine.kind", help="or choose another engine.kind")


@rule("data.source.serve", "transport.kind", "strategy.kind")
def images_are_served_by_a_database(settings: Settings, serve: bool, transport: str, strategy: str) -> None:
    if serve and _changed(settings, "data.source.serve") and (transport != "postgres" or strategy != "workunits"):
        settings.report(
            "cannot-serve",
            "images are served to workers that lack them by a class's database only (transport postgres, strategy workunits)",
            "data.source.serve",
            "transport.kind",
            "strategy.kind",
        )


@rule("strategy.units_per_update", "cluster.num_workers")
def units_fit_the_class(settings: Settings, units: int, workers: int | None) -> None:
    """A third to a half of the workers is a good number: with more, some do several for each update; with fewer, most are late."""
    if workers is None or workers <= 5 * units <= 5 * workers:
        return
    best = f"{max(1, round(0.3 * workers))} to {max(1, round(0.5 * workers))}"
    message = f"an update waits for {units} unit{'s' * (units > 1)} of work, and there are {workers} workers: {best} would fit"
    settings.report("units", message, "strategy.units_per_update", "cluster.num_workers", severity="warning")


@rule("strategy.rounds", "strategy.inner_steps", "training.max_steps")
def rounds_make_the_steps(settings: Settings, rounds: int | None, inner: int, steps: int | None) -> None:
    if rounds is not None and steps is not None and rounds != -(-steps // inner):
        message = f"{rounds} rounds of {inner} steps are {rounds * inner} steps, and training.max_steps is {steps}"
        settings.report("rounds", message, "strategy.rounds", "training.max_steps", help="give one of the two")


@rule("strategy.inner_steps", "strategy.fragments", "checkpoint.every_steps", "checkpoint.strategy")
def checkpoints_come_with_rounds(settings: Settings, inner: int, fragments: int, every: int | None, strategy: str | None) -> None:
    """The run's weights move when a round ends: what a worker has within one is its own, and starts over with the round."""
    if strategy == "steps" and every is not None and every % (inner // fragments or 1) and settings.given("checkpoint.every_steps"):
        message = f"a checkpoint every {every} steps is saved with the first round that ends there: a round has {inner // fragments} steps"
        settings.report("checkpoint", message, "checkpoint.every_steps", "strategy.inner_steps", severity="warning")


@rule("strategy.fragments", "strategy.inner_steps")
def fragments_take_equal_turns(settings: Settings, fragments: int, inner: int) -> None:
    if inner % fragments:
        message = f"{inner} inner steps cannot be shared evenly by {fragments} fragments"
        settings.report("fragments", message, "strategy.fragments", "strategy.inner_steps")


@rule("strategy.fragments", "strategy.late", "updates.aggregation.kind", "updates.memory")
def fragments_have_no_past(settings: Settings, fragments: int, late: str, rule: str, memory: float | None) -> None:
    """What is left of an earlier round is of another fragment."""
    for wrong, path in (
        (late == "weigh", "strategy.late"),
        (rule == "centered-clipping", "updates.aggregation.kind"),
        (bool(memory), "updates.memory"),
    ):
        if fragments > 1 and wrong:
            message = f"`{settings.spelling(path)}` looks back at other rounds, and with {fragments} fragments those are of other weights"
            settings.report("fragments", message, path, "strategy.fragments")


@rule("strategy.overlap_steps", "strategy.inner_steps", "strategy.fragments")
def overlap_ends_within_the_round(settings: Settings, overlap: int, inner: int, fragments: int) -> None:
    if overlap and overlap >= inner // fragments:
        message = f"an answer is waited for {overlap} steps after it was asked for, and the next is due after {inner // fragments}"
        settings.report("overlap", message, "strategy.overlap_steps", "strategy.inner_steps")


@rule("strategy.expert_weight_cap", "model.kind")
def only_a_mixture_has_experts_to_weigh(settings: Settings, cap: float | None, model: str) -> None:
    if cap is not None and model != "moe":
        message = f"a model of the kind {model} has no experts to weigh by their tokens"
        settings.report("experts", message, "strategy.expert_weight_cap", "model.kind", help="set strategy.expert_weight_cap to null")


@rule("strategy.expert_weight_cap", "updates.aggregation.kind", "updates.mixing.kind")
def only_the_mean_weighs_experts(settings: Settings, cap: float | None, rule: str, mixing: str) -> None:
    for kind, plain, path in ((rule, "mean", "updates.aggregation.kind"), (mixing, "none", "updates.mixing.kind")):
        if cap is not None and kind != plain:
            message = f"experts are weighed by the tokens that workers report, and {kind} goes by nothing that a worker says of itself"
            settings.report("experts", message, "strategy.expert_weight_cap", path, help="set strategy.expert_weight_cap to null")


@rule("strategy.expert_weight_cap", "updates.privacy.enabled")
def reported_loads_are_not_private(settings: Settings, cap: float | None, private: bool) -> None:
    if cap is not None and private:
        message = "workers report how many of their tokens chose each expert, and updates.privacy adds no noise to that"
        settings.report("experts", message, "strategy.expert_weight_cap", "updates.privacy.enabled")


@rule("strategy.quorum", "strategy.grace_s")
def grace_follows_a_quorum(settings: Settings, quorum: int | None, grace: float) -> None:
    if grace and quorum is None:
        message = f"`{settings.spelling('strategy.grace_s')}` has no effect: a round waits for all, since there is no quorum"
        settings.report("no-effect", message, "strategy.grace_s", severity="warning", help="set strategy.quorum")


@rule("strategy.late", "strategy.quorum", "strategy.outer.momentum")
def momentum_runs_away_from_late_ones(settings: Settings, late: str, quorum: int | None, momentum: float) -> None:
    """Momentum carries the weights on while contributions that know nothing of it are still under way."""
    if late == "weigh" and quorum == 1 and momentum > 0.5:
        message = f"every contribution is applied when it arrives, and an outer momentum of {momentum:g} overshoots with late ones"
        paths = ("strategy.outer.momentum", "strategy.quorum")
        settings.report("momentum", message, *paths, severity="warning", help="set strategy.outer.momentum to 0, or a larger quorum")


@rule("strategy.overlap_blend", "strategy.overlap_steps")
def blending_follows_an_overlap(settings: Settings, blend: float, overlap: int) -> None:
    if not overlap and _changed(settings, "strategy.overlap_blend"):
        message = f"`{settings.spelling('strategy.overlap_blend')}` has no effect: a worker waits for the new weights, and takes them"
        settings.report("no-effect", message, "strategy.overlap_blend", severity="warning", help="set strategy.overlap_steps")


@rule("strategy.inner_steps", "updates.privacy.enabled", "updates.privacy.unit")
def steps_alone_have_no_single_samples(settings: Settings, inner: int, private: bool, unit: str) -> None:
    if private and unit == "sample":
        message = "a worker of diloco sends where many steps led it: there is no gradient of a sample to clip"
        settings.report("privacy", message, "updates.privacy.unit", "strategy.kind", help="set updates.privacy.unit to contribution")


@rule("updates.experts_apart", "model.kind")
def only_a_mixture_has_experts_to_compare(settings: Settings, apart: bool, model: str) -> None:
    if apart and model != "moe":
        message = f"a model of the kind {model} has no experts that a rule could look at"
        settings.report("experts", message, "updates.experts_apart", "model.kind", help="set updates.experts_apart to false")


@rule("updates.experts_apart", "updates.aggregation.kind", "updates.mixing.kind")
def columns_are_apart_already(settings: Settings, apart: bool, kind: str, mixing: str) -> None:
    if apart and Aggregation.kinds[kind].by_column and mixing != "nearest-neighbours":
        message = f"`{settings.spelling('updates.experts_apart')}` has no effect: the rule {kind} looks at each number by itself"
        settings.report("no-effect", message, "updates.experts_apart", severity="warning")


@rule("updates.mixing.kind", "updates.mixing.byzantine")
def mixing_quorum(settings: Settings, kind: str, byzantine: int | None) -> None:
    _quorum(settings, "updates.mixing.byzantine", kind, byzantine, 1, ("updates.mixing.kind",))


def _quorum(settings: Settings, setting: str, kind: str, byzantine: int | None, bucket: int, others: tuple[str, ...]) -> None:
    count, path = contributions(settings)
    if byzantine is None or count is None:
        return
    needed, possible = quorum(kind, byzantine, bucket), tolerated(kind, count, bucket)
    if count < needed:
        buckets = f" in buckets of {bucket}" if bucket > 1 else ""
        message = f"{kind} against f = {byzantine} false contributions needs {formula(kind, bucket)} = {needed} of them{buckets}"
        help = f"raise the round to {needed}" + (f", or lower f to {possible}" if possible >= 0 else "")
        settings.report("quorum", f"{message}, and a round has {count}", setting, path, *others, help=help)


@rule("updates.aggregation", "cluster.num_workers", "strategy.kind")
def enough_workers_to_compare(settings: Settings, aggregation: Aggregation, workers: int | None, strategy: str) -> None:
    """A rule that is only a mean with the workers there are does not do what it was chosen for."""
    count, path = contributions(settings)
    known = {path: count, "cluster.num_workers": workers}
    few = min((number for number in known.values() if number is not None), default=None)
    if few is None or strategy == "local" or few >= aggregation.works_from:
        return
    where = next(path for path, number in known.items() if number == few)
    message = f"{aggregation.kind} withstands nothing with contributions of {few} workers: it takes {aggregation.works_from}"
    settings.report("quorum", message, "updates.aggregation.kind", where, severity="warning", help="with fewer it is a mean")


@rule("updates.aggregation.select", "updates.aggregation.byzantine")
def selection_is_honest(settings: Settings, select: int | None, byzantine: int | None) -> None:
    count, path = contributions(settings)
    if select is None or byzantine is None or count is None:
        return
    rows = -(-count // bucket_size(settings))
    if select > rows - byzantine:
        message = (
            f"multi-krum averages {select} of {rows}, and up to {byzantine} of them are false: at most {rows - byzantine} can be chosen"
        )
        settings.report("selection", message, "updates.aggregation.select", path, "updates.aggregation.byzantine")


@rule("strategy.min_staleness", "strategy.max_staleness")
def staleness_bounds(settings: Settings, least: int | None, most: int) -> None:
    if least is not None and least > most:
        message = f"the least staleness bound, {least}, is above max_staleness, {most}"
        settings.report("staleness", message, "strategy.min_staleness", "strategy.max_staleness")


@rule("training.schedule.warmup_steps", "training.max_steps")
def warmup_inside_run(settings: Settings, warmup: int, steps: int | None) -> None:
    if steps is not None and warmup and warmup >= steps:
        paths = ("training.schedule.warmup_steps", "training.max_steps")
        message = f"a warm-up of {warmup} steps does not end within a run of {steps}: the learning rate never reaches its peak"
        settings.report("warm-up", message, *paths, severity=_across(settings, *paths))


@rule("training.schedule.kind", "training.schedule.end_learning_rate", "training.optimizer.learning_rate")
def schedule_falls(settings: Settings, kind: str, end: float, start: float) -> None:
    if kind != "constant" and end > start:
        paths = ("training.schedule.end_learning_rate", "training.optimizer.learning_rate")
        message = f"the learning rate would rise from {start:g} to {end:g} over the run"
        settings.report("schedule", message, *paths, severity=_across(settings, *paths))


@rule(
    "training.global_batch_size",
    "training.batch_size",
    "training.gradient_accumulation_steps",
    "launch.devices_per_node",
    "launch.nodes",
    "strategy.kind",
)
def batch_arithmetic(
    settings: Settings, whole: int | None, batch: int | None, accumulation: int, devices: int | None, nodes: int | None, kind: str
) -> None:
    if whole is None or batch is None:
        return
    started = settings.processes if kind == "local" and settings.kinds.get(("engine",)) != "single" else None
    count = devices * (nodes or 1) if devices else started
    step = batch * accumulation * (count or 1)
    paths = ("training.global_batch_size", "training.batch_size", "training.gradient_accumulation_steps")
    if count and whole != step:
        message = f"a global batch of {whole} is not {batch} × {accumulation} × {count} devices = {step}"
        help = f"set the global batch size to {step}, or leave it out; {fitting(whole, batch, accumulation, count)}"
        settings.report("batch-arithmetic", message, *paths, "launch.devices_per_node", help=help)
    elif whole % step:
        message = f"a global batch of {whole} is no multiple of {batch} × {accumulation} = {step}"
        settings.report("batch-arithmetic", message, *paths, help=f"no number of devices fits; {fitting(whole, batch, accumulation, 1)}")


def fitting(whole: int, batch: int, accumulation: int, devices: int) -> str:
    """With how many devices, and with what accumulation, a global batch comes out right."""
    ways = []
    if whole % (batch * accumulation) == 0:
        number = whole // (batch * accumulation)
        ways.append(f"{number} device{'s' if number > 1 else ''} (launch.devices_per_node)")
    if whole % (batch * devices) == 0:
        ways.append(f"training.gradient_accumulation_steps {whole // (batch * devices)} on {devices} device{'s' if devices > 1 else ''}")
    return f"{whole} fits {' or '.join(ways)}" if ways else f"{whole} is no multiple of {batch} × {devices}, so no accumulation fits either"


@rule("training.gradient_health.enabled", "training.gradient_health.initial_clip_value", "training.gradient_health.final_clip_value")
def clip_value_tightens(settings: Settings, enabled: bool, initial: float, final: float) -> None:
    if enabled and final > initial:
        paths = ("training.gradient_health.final_clip_value", "training.gradient_health.initial_clip_value")
        settings.report(
            "gradient-health", f"the clip value would loosen from {initial:g} to {final:g}", *paths, severity=_across(settings, *paths)
        )


def _changed(settings: Settings, path: str) -> bool:
    """Did somebody write another value than the default?"""
    try:
        return settings.given(path) and settings.get(path) != default_at(tuple(path.split(".")), settings.kinds)
    except UnavailableError:
        return False


_NEVER, _NOT_STEPS = ("never",), ("never", "epoch")
_OF_LAUNCHERS = tuple(
    (f"launch.{kind}.{name}", "launch.kind", lambda chosen, kind=kind: chosen != kind, f"that is for launch.kind {kind}")
    for kind, names in {
        "ssh": ("python", "wheel", "options"),
        "ray": ("address", "cpus"),
        "slurm": ("options", "setup"),
        "kubernetes": ("image", "namespace", "storage_gb", "storage_class"),
    }.items()
    for name in names
)
NO_EFFECT: tuple[tuple[str, str, Callable[[Any], bool], str], ...] = (
    ("data.padding_side", "data.batching", lambda way: way == "packed", "texts are packed, so nothing is padded"),
    ("data.truncation", "data.batching", lambda way: way == "packed", "texts are packed, so none is too long"),
    ("data.loader.prefetch_factor", "data.loader.num_workers", lambda count: not count, "no processes load ahead"),
    ("data.loader.persistent_workers", "data.loader.num_workers", lambda count: not count, "no processes load ahead"),
    ("data.shuffle_buffer", "data.streaming", lambda streams: not streams, "the data is no stream, so all of it is shuffled"),
    ("data.mixing.temperature", "data.mixing.enabled", lambda mixes: not mixes, "sources are not drawn by weight"),
    ("data.max_eval_samples", "evaluation.strategy", lambda when: when == "never", "nothing is evaluated"),
    ("evaluation.every_steps", "evaluation.strategy", lambda when: when in _NOT_STEPS, "evaluations do not go by steps"),
    ("evaluation.batches", "evaluation.strategy", lambda when: when in _NEVER, "nothing is evaluated"),
    ("evaluation.batch_size", "evaluation.strategy", lambda when: when in _NEVER, "nothing is evaluated"),
    ("checkpoint.every_steps", "checkpoint.strategy", lambda when: when in _NOT_STEPS, "checkpoints do not go by steps"),
    ("training.schedule.end_learning_rate", "training.schedule.kind", lambda kind: kind == "constant", "the learning rate stays as it is"),
    ("training.schedule.power", "training.schedule.kind", lambda kind: kind != "polynomial", "the schedule is no polynomial"),
    ("training.schedule.warmup", "training.schedule.warmup_steps", lambda steps: not steps, "there is no warm-up"),
    ("training.clipping.max_norm", "training.clipping.enabled", lambda clips: not clips, "gradients are not clipped"),
    ("training.early_stopping.threshold", "training.early_stopping.patience", lambda patience: patience is None, "nothing stops early"),
    ("training.allow_emulation", "training.precision.kind", lambda kind: kind not in EMULATED, "no precision is emulated"),
    ("training.penalties.min_sequence_length", "training.penalties.eos_weight", lambda weight: not weight, "an early end costs nothing"),
    ("training.gradient_health.initial_clip_value", "training.gradient_health.enabled", lambda on: not on, "nobody watches the gradients"),
    ("training.gradient_health.final_clip_value", "training.gradient_health.enabled", lambda on: not on, "nobody watches the gradients"),
    ("training.gradient_health.warmup_steps", "training.gradient_health.enabled", lambda on: not on, "nobody watches the gradients"),
    ("training.gradient_health.explosion_threshold", "training.gradient_health.enabled", lambda on: not on, "nobody watches the gradients"),
    ("training.gradient_health.lr_reduction_factor", "training.gradient_health.auto_reduce_lr", lambda on: not on, "it is never reduced"),
    ("logging.directory", "logging.sinks", lambda sinks: "tensorboard" not in [sink.kind for sink in sinks], "TensorBoard is not used"),
    ("hub.repo_id", "hub.enabled", lambda on: not on, "nothing is uploaded"),
    ("hub.push_interval", "hub.enabled", lambda on: not on, "nothing is uploaded"),
    ("hub.private", "hub.enabled", lambda on: not on, "nothing is uploaded"),
    ("updates.privacy.noise_multiplier", "updates.privacy.enabled", lambda on: not on, "differential privacy is off"),
    ("updates.privacy.unit", "updates.privacy.enabled", lambda on: not on, "differential privacy is off"),
    ("updates.privacy.delta", "updates.privacy.enabled", lambda on: not on, "differential privacy is off"),
    (
        "updates.below_quorum",
        "updates.aggregation",
        lambda rule: rule.withstands is None,
        "the rule needs no certain number of them",
    ),
    ("strategy.min_staleness", "strategy.adaptive", lambda on: not on, "all workers have the same bound"),
    ("strategy.max_staleness_multiplier", "strategy.adaptive", lambda on: not on, "all workers have the same bound"),
    ("strategy.outer.nesterov", "strategy.outer.momentum", lambda momentum: not momentum, "there is no momentum"),
    ("engine.nvme_path", "engine.nvme_offload", lambda on: not on, "nothing is kept on a disk"),
    ("engine.stage3_prefetch_bucket_size", "engine.zero_stage", lambda stage: stage < 3, "this is not ZeRO stage 3"),
    ("engine.stage3_param_persistence_threshold", "engine.zero_stage", lambda stage: stage < 3, "this is not ZeRO stage 3"),
    ("engine.stage3_max_live_parameters", "engine.zero_stage", lambda stage: stage < 3, "this is not ZeRO stage 3"),
    *_OF_LAUNCHERS,
    ("launch.nodes", "engine.kind", lambda kind: kind == "single", "one process on one machine trains"),
)
"""Settings that do nothing where another one has such a value: the setting, the other one, when that is so, and why."""


@rule()
def what_does_nothing_here(settings: Settings) -> None:
    for path, other, is_so, why in NO_EFFECT:
        try:
            if _changed(settings, path) and is_so(settings.get(other)):
                message = f"`{settings.spelling(path)}` has no effect: {why}"
                settings.report("no-effect", message, path, other, severity="warning", help=f"`{settings.spelling(other)}` decides that")
        except UnavailableError:
            continue


@rule("training.precision.kind", "training.allow_emulation")
def emulation_is_labelled(settings: Settings, kind: str, allowed: bool) -> None:
    if kind in EMULATED and allowed:
        message = f"{kind} is emulated: what is learned is as with real {kind}, how long it takes is not"
        settings.report("emulated", message, "training.precision.kind", severity="warning")


@rule("strategy.kind", "engine.kind")
def alone_or_together(settings: Settings, kind: str, engine: str) -> None:
    """Who works alone has no use for settings of a cluster; a pipeline's stages may be on the machines of one."""
    if kind != "local":
        return
    meeting = () if engine == "pipeline" else ("transport", "cluster", "coordinator")
    for section in ("updates", *meeting):
        written = [path for path in map(".".join, settings.history) if path.startswith(f"{section}.") and _changed(settings, path)]
        if written:
            path = written[0]
            message = f"`{settings.spelling(path)}` has no effect: strategy.kind is local, so one worker trains alone"
            settings.report("no-effect", message, path, severity="warning", help="choose syncps, edp or async, or start with --workers N")


@rule("training.polyak_alpha", "strategy.kind")
def polyak_in_use(settings: Settings, alpha: float | None, kind: str) -> None:
    if alpha is not None and kind != "syncps":
        why = "one worker alone pulls nothing" if kind == "local" else f"with {kind} a pull replaces the weights"
        message = f"`{settings.spelling('training.polyak_alpha')}` has no effect: {why}"
        settings.report("no-effect", message, "training.polyak_alpha", severity="warning")


@rule("engine.zero_stage", "engine.nvme_offload", "engine.cpu_offload")
def offload_fits_stage(settings: Settings, stage: int, nvme: bool, cpu: bool) -> None:
    if nvme and stage < 3:
        settings.report("offload", f"offload to NVMe needs ZeRO stage 3, this is stage {stage}", "engine.nvme_offload", "engine.zero_stage")
    if nvme and cpu:
        settings.report("offload", "offload to CPU memory and to NVMe exclude each other", "engine.nvme_offload", "engine.cpu_offload")


_NAME = r"(?!.*(?:--|\.\.))[A-Za-z0-9_](?:[A-Za-z0-9_.-]{0,94}[A-Za-z0-9_])?"
_REPOSITORY = re.compile(f"{_NAME}/{_NAME}")


@rule("hub.enabled", "hub.repo_id", "hub.token")
def hub_has_a_place(settings: Settings, enabled: bool, repo_id: str, token: Secret | None) -> None:
    if enabled and not (_REPOSITORY.fullmatch(repo_id) and not repo_id.endswith(".git")):
        message = f"uploads are on, and `{repo_id}` is not a repository" if repo_id else "uploads are on, and no repository is named"
        settings.report("hub", message, "hub.repo_id", "hub.enabled", help="name it as user/name, of letters, digits, `-`, `_` and `.`")
    if enabled and not (token and token.reveal()):
        message = "uploads are on, and there is no token"
        settings.report("hub", message, "hub.enabled", help="export HF_TOKEN=hf_… before the run")


@rule("serving.num_nodes", "cluster.workers")
def nodes_are_there(settings: Settings, nodes: int | None, workers: tuple[str, ...]) -> None:
    if nodes is not None and workers and nodes != len(workers) + 1:
        message = f"the layers go over {nodes} nodes, and the cluster has {len(workers) + 1} (the server and {len(workers)} workers)"
        settings.report("nodes", message, "serving.num_nodes", "cluster.workers")


@rule("serving.num_nodes", "model.num_layers")
def a_layer_for_each_node(settings: Settings, nodes: int | None, layers: int | None) -> None:
    if nodes is not None and layers is not None and nodes > layers:
        settings.report("nodes", f"{layers} layers do not go over {nodes} nodes", "serving.num_nodes", "model.num_layers")


@rule("scheduler.tasks")
def tasks_named_once(settings: Settings, tasks: tuple[Any, ...]) -> None:
    ids = [task.id for task in tasks]
    for name in sorted({name for name in ids if ids.count(name) > 1}):
        settings.report("tasks", f"task `{name}` stands twice", "scheduler.tasks")


@rule("scheduler.tasks", "scheduler.kind")
def tasks_are_given_out(settings: Settings, tasks: tuple[Any, ...], kind: str) -> None:
    if tasks and kind == "none":
        message = "tasks are listed, and no scheduler gives them out"
        settings.report("tasks", message, "scheduler.tasks", "scheduler.kind", help="set it to priority, capability or gale-shapley")


@rule("scheduler.tasks")
def tasks_share_the_data(settings: Settings, tasks: tuple[Any, ...]) -> None:
    given = [task.data_share for task in tasks if task.data_share is not None]
    open_ones, whole = len(tasks) - len(given), sum(given)
    if whole > 1 + 1e-9 or (open_ones and whole > 1 - 1e-9):
        more = f", and {open_ones} without a share want some, too" if open_ones else ""
        settings.report(
            "tasks", f"the tasks ask for {whole:.0%} of the data{more}", "scheduler.tasks", help="together they may have all of it"
        )


@rule("scheduler.kind", "strategy.kind")
def strategy_takes_tasks(settings: Settings, kind: str, strategy: str) -> None:
    if kind == "none" or Strategy.kinds[strategy].takes_tasks:
        return
    able = ", ".join(name for name, found in Strategy.kinds.items() if found.takes_tasks)
    message = f"workers of the strategy {strategy} cannot be given tasks one after the other; those of {able} can"
    settings.report("scheduler", message, "scheduler.kind", "strategy.kind", help="set scheduler.kind to none")


@rule("scheduler.kind", "cluster.hosts")
def claims_are_for_a_scheduler(settings: Settings, kind: str, hosts: dict[str, Any]) -> None:
    for name, host in hosts.items() if kind == "none" else ():
        given = [claim for claim in ("memory_gb", "flops", "bandwidth_mbps") if getattr(host, claim) is not None]
        if given:
            path = f"cluster.hosts.{name}.{given[0]}"
            message = f"`{settings.spelling(path)}` is for a scheduler, and there is none"
            settings.report("no-effect", message, path, severity="warning", help="set scheduler.kind")
            return


@rule("task", "model")
def task_fits_model(settings: Settings, task: Task | None, model: Model) -> None:
    """A model that learns one task learns every other one that needs the same of the data."""
    if task is None:
        settings.report("task", f"a model of kind {model.kind} does not say what it learns", "model.kind", help="set task")
    elif model.learns and task.kind not in model.learns and task.needs not in [Task.kinds[name].needs for name in model.learns]:
        settings.report("task", f"a model of kind {model.kind} does not learn {task.kind}", "task.kind", "model.kind")


@rule("task", "data.source")
def pairs_for_those_who_compare(settings: Settings, task: Task | None, source: DataSource | None) -> None:
    if task is not None and task.needs == "pairs" and source is not None and not source.has_pairs:
        message = f"the task {task.kind} learns from pairs of answers, and the data source {source.kind} has none"
        settings.report("task", message, "task.kind", "data.source.kind", help="set data.source to {kind: preferences, path: …}")


@rule("task", "engine.kind")
def whole_networks_compare(settings: Settings, task: Task | None, engine: str) -> None:
    if task is not None and task.needs in ("pairs", "prompts") and engine in ("fsdp", "deepspeed", "pipeline", "collectives"):
        message = f"the task {task.kind} needs whole networks in each process, and the engine {engine} has none"
        settings.report("engine", message, "engine.kind", "task.kind", help="choose single or ddp")


@rule("task", "engine.kind", "strategy.kind")
def rollouts_are_made_by_one_process(settings: Settings, task: Task | None, engine: str, strategy: str) -> None:
    if task is None or task.needs != "prompts":
        return
    if engine != "single":
        message = f"answers are made by one process as yet, and engine.kind is {engine}"
        settings.report("not-built", message, "engine.kind", "task.kind", help="set engine.kind to single")
    if strategy != "local" and not Strategy.kinds[strategy].gives_answers:
        message = f"the strategy {strategy} has no use for answers: its workers send what they learned"
        able = " or ".join(name for name, kind in Strategy.kinds.items() if kind.gives_answers)
        settings.report("strategy", message, "strategy.kind", "task.kind", help=f"set strategy.kind to {able}, or to local")


@rule("task", "strategy.kind", "transport.kind")
def answers_are_for_policies(settings: Settings, task: Task | None, strategy: str, transport: str) -> None:
    if not Strategy.kinds[strategy].gives_answers:
        return
    if task is not None and task.needs != "prompts":
        message = f"workers of the strategy {strategy} answer prompts, and the task {task.kind} has none"
        settings.report("strategy", message, "strategy.kind", "task.kind", help="set task to ppo, with a section rlhf")
    if transport == "postgres":
        message = f"a database leases units of data, and no prompts (strategy {strategy})"
        settings.report("strategy", message, "transport.kind", "strategy.kind", help="set transport.kind to zmq")


@rule("strategy.kind", "updates")
def answers_are_made_with_whole_weights(settings: Settings, strategy: str, updates: Updates) -> None:
    """Answers are no updates: nothing is done to them, and weights that were shortened on their way would give other ones."""
    if not Strategy.kinds[strategy].gives_answers:
        return
    given = {
        "updates.codec.kind": updates.codec.kind != "none",
        "updates.aggregation.kind": updates.aggregation.kind != "mean",
        "updates.privacy.enabled": updates.privacy.enabled,
        "updates.clip_norm": updates.clip_norm is not None,
        "updates.memory": bool(updates.memory),
    }
    for path in (path for path, chosen in given.items() if chosen):
        message = f"workers of the strategy {strategy} send answers, and `{settings.spelling(path)}` is for updates of the weights"
        settings.report("strategy", message, path, "strategy.kind", help="leave it out")


@rule("rlhf", "strategy.prompts_per_unit")
def rollouts_are_whole_units(settings: Settings, rlhf: Rlhf | None, prompts: int | None) -> None:
    if rlhf is None or prompts is None:
        return
    answers = rlhf.group * prompts
    if rlhf.ppo.rollout_size % answers:
        names = ("rlhf.ppo.rollout_size", "strategy.prompts_per_unit")
        settings.report("rollouts", f"`{names[0]}` of {rlhf.ppo.rollout_size} is no multiple of the {answers} answers of a unit", *names)


@rule("task", "rlhf", "training.gradient_accumulation_steps")
def policies_have_settings(settings: Settings, task: Task | None, rlhf: Rlhf | None, pieces: int) -> None:
    if task is None or task.needs != "prompts":
        return
    if rlhf is None:
        settings.report("task", f"the task {task.kind} needs a section rlhf: it says what is rewarded", "task.kind")
        return
    answers, mini = rlhf.ppo.rollout_size, rlhf.ppo.mini_batch_size
    for whole, part, names in (
        (answers, mini, ("rlhf.ppo.rollout_size", "rlhf.ppo.mini_batch_size")),
        (mini // rlhf.row, pieces, ("rlhf.ppo.mini_batch_size", "training.gradient_accumulation_steps")),
        (mini, rlhf.row, ("rlhf.ppo.mini_batch_size", "rlhf.algorithm")),
        (answers, rlhf.group, ("rlhf.ppo.rollout_size", "rlhf.group_size")),
    ):
        if whole % part:
            settings.report("rollouts", f"`{names[0]}` of {whole} is no multiple of `{names[1]}`, {part}", *names)


@rule("rlhf")
def rewards_can_be_given(settings: Settings, rlhf: Rlhf | None) -> None:
    if rlhf is None:
        return
    if rlhf.reward.kind == "exact" and rlhf.prompts is None:
        message = "the reward exact needs prompts with their right answers, and there is no file of them"
        settings.report("reward", message, "rlhf.reward.kind", help="set rlhf.prompts")
    if isinstance(rlhf.reward, TrainedReward) and rlhf.reward.run is None and rlhf.reward.preferences is None:
        message = "a trained reward needs the run that trained it, or preferences to train it from"
        settings.report("reward", message, "rlhf.reward.kind", help="set rlhf.reward.run or rlhf.reward.preferences")


@rule("task.label_smoothing")
def smoothing_keeps_the_better_answer(settings: Settings, smoothing: float) -> None:
    if smoothing >= 0.5:
        settings.report(
            "task", f"with a label smoothing of {smoothing:g} the rejected answer would be the better one", "task.label_smoothing"
        )


@rule("task", "model.dropout")
def dropout_in_use(settings: Settings, task: Task | None, dropout: float) -> None:
    if dropout and task is not None and not task.drops:
        message = f"`{settings.spelling('model.dropout')}` has no effect: the task {task.kind} is learned without dropout"
        settings.report("no-effect", message, "model.dropout", "task.kind", severity="warning")


@rule("task", "training.penalties")
def penalties_in_use(settings: Settings, task: Task | None, penalties: Any) -> None:
    given = [name for name in ("repetition_weight", "immediate_repetition_weight", "eos_weight") if getattr(penalties, name)]
    if given and task is not None and task.needs not in TEXT:
        message = f"penalties are for language models, this is {task.kind}"
        settings.report("no-effect", message, f"training.penalties.{given[0]}", "task.kind")
    elif given and task is not None and task.needs != "tokens":
        message = f"penalties have no effect: the task {task.kind} has a loss of its own"
        settings.report("no-effect", message, f"training.penalties.{given[0]}", "task.kind", severity="warning")


@rule("data.source.parts", "data.mixing.enabled")
def mixture_can_be_drawn_from(settings: Settings, parts: tuple[Any, ...], mixing: bool) -> None:
    weighted = [part for part in parts if part.weight is not None]
    if not parts:
        settings.report("mixture", "a mixture needs at least one part", "data.source.parts")
    elif weighted and not mixing:
        message = "the parts have weights, and data.mixing is off: they would come one after the other"
        settings.report("mixture", message, "data.source.parts", "data.mixing.enabled", help="set data.mixing.enabled to true")
    elif weighted and len(weighted) < len(parts):
        settings.report("mixture", "some parts have a weight and some have none", "data.source.parts", help="give all of them one, or none")


@rule("training.early_stopping.patience", "evaluation.strategy", "evaluation.batches")
def stopping_needs_evaluation(settings: Settings, patience: int | None, strategy: str | None, batches: int | None) -> None:
    if patience is not None and (strategy == "never" or batches == 0):
        path = "evaluation.strategy" if strategy == "never" else "evaluation.batches"
        settings.report("early-stopping", "early stopping needs evaluations, and there are none", "training.early_stopping.patience", path)


@rule("training.penalties.eos_weight", "training.penalties.min_sequence_length")
def early_ends_are_defined(settings: Settings, weight: float, length: int) -> None:
    if weight and not length:
        message = "an early end is penalised, and no length is early: min_sequence_length is 0"
        settings.report("no-effect", message, "training.penalties.eos_weight", "training.penalties.min_sequence_length")


# --- what could not be put together -------------------------------------------------------------------------------


@rule("name")
def a_name_is_part_of_a_folders_name(settings: Settings, name: str | None) -> None:
    if name and (set(name) & set("/\\") or name in (".", "..")):
        message = f"`{name}` is to be a part of a folder's name, so it has no / or \\"
        settings.report("name", message, "name", help="output_dir says where runs are kept")


@rule("logging.project", "output_dir")
def projects_stay_among_the_runs(settings: Settings, project: str | None, kept_in: str) -> None:
    parts = re.split(r"[/\\]", project or "")
    if project and (".." in parts or not parts[0] or re.match(r"[A-Za-z]:", project)):
        settings.report("name", f"`{project}` leads out of {kept_in}", "logging.project", help="output_dir says where runs are kept")


@rule("transport.kind", "engine.kind", "strategy.kind")
def threads_have_no_engines_of_several(settings: Settings, transport: str, engine: str, strategy: str) -> None:
    if transport == "in-process" and engine != "single" and strategy != "local":
        message = f"with transport in-process workers are threads of one process, and the engine {engine} is several processes"
        settings.report("engine", message, "engine.kind", "transport.kind", help="set engine.kind to single, or transport.kind to zmq")


@rule("engine.zero_stage")
def zero_shards_something(settings: Settings, stage: int) -> None:
    if stage == 0:
        settings.report("engine", "stage 0 shards nothing: that is the engine ddp", "engine.zero_stage", help="set engine.kind to ddp")


@rule("engine.kind", "training.optimizer.name")
def sharding_leaves_matrices_whole(settings: Settings, engine: str, optimizer: str) -> None:
    if engine in SHARDING and optimizer in WHOLE_MATRICES:
        message = f"{optimizer} looks at whole matrices, and the engine {engine} cuts them"
        settings.report("engine", message, "training.optimizer.name", "engine.kind", help="take AdamW, or the engine ddp")


@rule("engine.kind", "training.optimizer.name", "training.optimizer.moments")
def narrow_moments_are_adams(settings: Settings, engine: str, optimizer: str, moments: str) -> None:
    path = "training.optimizer.moments"
    if moments != "fp32" and optimizer not in ("Adam", "AdamW"):
        settings.report("optimizer", f"{optimizer} keeps its means in fp32", path, "training.optimizer.name", help="take Adam or AdamW")
    if moments != "fp32" and engine in SHARDING:
        message = f"the engine {engine} keeps the optimizer's means in fp32, a part in each process"
        settings.report("engine", message, path, "engine.kind", help="leave it out, or take the engine single or ddp")


@rule("training.cuda_graph", "engine.kind", "training.precision.kind", "training.gradient_checkpointing")
def recordings_are_of_plain_passes(settings: Settings, records: bool, engine: str, precision: str, recomputes: bool) -> None:
    path = "training.cuda_graph"
    if records and engine not in ("single", "collectives"):
        message = f"a step of the engine {engine} is not recorded: its processes wait for each other in between"
        settings.report("engine", message, path, "engine.kind", help="set it to false, or take the engine single")
    if records and precision in EMULATED:
        settings.report("precision", f"passes in {precision} are not recorded", path, "training.precision.kind", help="set it to false")
    if records and recomputes:
        settings.report("precision", "passes that compute activations again are not recorded", path, "training.gradient_checkpointing")


@rule("training.cuda_graph", "model.episodic_memory.enabled")
def recordings_have_no_memory(settings: Settings, records: bool, remembers: bool) -> None:
    if records and remembers:
        message = "a memory decides in the middle of a step what it replays, and that is not recorded"
        settings.report("model", message, "training.cuda_graph", "model.episodic_memory.enabled", help="set one of them to false")


@rule("engine.kind", "task")
def sharding_takes_one_network(settings: Settings, engine: str, task: Task | None) -> None:
    if engine in SHARDING and task is not None and task.kind == "gan":
        settings.report("engine", f"the engine {engine} shards one network, and the task gan has two", "engine.kind", help="take ddp")


@rule("engine.kind", "model.kind", "training.compile", "training.precision.kind")
def pipelines_cut_language_models(settings: Settings, engine: str, model: str, compile: bool, precision: str) -> None:
    """A pipeline's stages are layers of a transformer, each of which computes by itself."""
    if engine != "pipeline":
        return
    if model not in CUT_INTO_STAGES and settings.given("model.kind"):  # a cluster's file alone names no model
        message = f"a pipeline has the layers of one model on several machines, and a model of kind {model} is not cut"
        settings.report(
            "engine", message, "engine.kind", "model.kind", help=f"choose model.kind {', '.join(CUT_INTO_STAGES)}, or engine ddp"
        )
    if compile:
        settings.report("engine", "the stages of a pipeline are not compiled", "training.compile", "engine.kind", help="set it to false")
    if precision in EMULATED:
        message = f"the stages of a pipeline do not emulate {precision}"
        settings.report("engine", message, "training.precision.kind", "engine.kind", help="take bf16, fp16 or fp32")


@rule("engine.nvme_offload", "logging.track_gradients")
def gradients_on_a_disk_are_gone(settings: Settings, offload: bool, track: bool) -> None:
    if offload and track:
        message = "DeepSpeed gives gradients on a disk up with each step, so their norms cannot be recorded"
        settings.report("engine", message, "logging.track_gradients", "engine.nvme_offload")


@rule("engine.kind", "updates.privacy.enabled", "updates.privacy.unit")
def samples_are_clipped_in_one_process(settings: Settings, engine: str, private: bool, unit: str) -> None:
    if private and unit == "sample" and engine != "single":
        message = f"samples are clipped one by one in a single process, and the engine {engine} is several"
        settings.report("privacy", message, "updates.privacy.unit", "engine.kind", help="set engine.kind to single")


@rule("model.from_scratch", "model.weights")
def weights_are_fresh_or_given(settings: Settings, from_scratch: bool, weights: str | None) -> None:
    if from_scratch and weights is not None:
        settings.report("model", "fresh weights and given ones contradict each other", "model.from_scratch", "model.weights")


@rule("model.positions", "model.hidden_size", "model.num_heads")
def rotary_positions_turn_pairs(settings: Settings, positions: str, width: int, heads: int) -> None:
    if positions == "rotary" and width % heads == 0 and (width // heads) % 2:
        message = f"rotary positions turn pairs, and a head has {width // heads} numbers ({width} / {heads})"
        paths = ("model.num_heads", "model.hidden_size")
        settings.report("heads", message, *paths, help="choose sizes with an even quotient, or model.positions: learned")


@rule("training.optimizer.kwargs")
def the_learning_rate_has_a_setting_of_its_own(settings: Settings, keywords: dict[str, Any]) -> None:
    if "lr" in keywords:
        own = settings.spelling("training.optimizer.learning_rate")
        settings.report("optimizer", f"`lr` has a setting of its own: `{own}`", "training.optimizer.kwargs.lr")


@rule("strategy.kind", "data.streaming")
def units_are_pieces_of_data_with_an_end(settings: Settings, strategy: str, streams: bool) -> None:
    if strategy == "workunits" and streams:
        message = "work units are pieces of data that has an end, and a stream has none"
        settings.report("stream", message, "data.streaming", "strategy.kind", help="choose another strategy, or data.streaming: false")
