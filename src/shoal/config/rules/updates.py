"""Rules for codecs, aggregation, mixing and privacy."""

from __future__ import annotations

from shoal.config.derived_values import bucket_size, contributions, formula, quorum, tolerated
from shoal.config.layers import Settings
from shoal.config.rules.rule import rule
from shoal.config.schema.task import Task
from shoal.config.schema.updates import Aggregation


@rule("updates.privacy.enabled", "updates.clip_norm")
def privacy_needs_clipping(settings: Settings, private: bool, clip: float | None) -> None:
    if private and clip is None:
        message = "differential privacy needs a limit on each contribution, and clipping is off"
        help = f"set `{settings.spelling('updates.clip_norm')}` above 0"
        settings.report("privacy", message, "updates.privacy.enabled", "updates.clip_norm", help=help)


@rule("updates.codec.error_feedback", "updates.codec.error_decay")
def what_fades_is_kept(settings: Settings, kept: bool, decay: float) -> None:
    if decay < 1 and not kept:
        message = "what was left out is to fade, and none of it is kept"
        settings.report("codec", message, "updates.codec.error_decay", "updates.codec.error_feedback", help="leave one of them out")


@rule("updates.codec.values", "updates.codec.chunk")
def two_magnitudes_are_those_of_a_chunk(settings: Settings, values: str, chunk: int | None) -> None:
    if values == "2-bit" and chunk is None:
        message = "2-bit values have magnitudes for each chunk, and there are no chunks"
        settings.report("codec", message, "updates.codec.values", "updates.codec.chunk", help="set updates.codec.chunk, such as to 4096")


@rule("updates.aggregation.kind", "updates.aggregation.byzantine")
def robust_quorum(settings: Settings, kind: str, byzantine: int | None) -> None:
    bucket = bucket_size(settings)
    others = ("updates.aggregation.kind",) if bucket == 1 else ("updates.mixing.size", "updates.aggregation.kind")
    _quorum(settings, "updates.aggregation.byzantine", kind, byzantine, bucket, others)


@rule("strategy.fragments", "strategy.late", "updates.aggregation.kind", "updates.memory")
def fragments_have_no_past(settings: Settings, fragments: int, late: str, rule: str, memory: float | None) -> None:
    """Left-over values of an earlier round belong to another fragment."""
    for wrong, path in (
        (late == "weigh", "strategy.late"),
        (rule == "centered-clipping", "updates.aggregation.kind"),
        (bool(memory), "updates.memory"),
    ):
        if fragments > 1 and wrong:
            message = f"`{settings.spelling(path)}` looks back at other rounds, and with {fragments} fragments those are of other weights"
            settings.report("fragments", message, path, "strategy.fragments")


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


@rule("strategy.inner_steps", "updates.privacy.enabled", "updates.privacy.unit")
def steps_alone_have_no_single_samples(settings: Settings, inner: int, private: bool, unit: str) -> None:
    if private and unit == "sample":
        message = "a worker of diloco sends where many steps led it: there is no gradient of a sample to clip"
        settings.report("privacy", message, "updates.privacy.unit", "strategy.kind", help="set updates.privacy.unit to contribution")


@rule("updates.scorer.enabled", "strategy.kind")
def a_score_compares_workers(settings: Settings, scored: bool, strategy: str) -> None:
    if scored and strategy != "local" and contributions(settings)[0] == 1:
        message = f"a score compares the contributions to a version, and with {strategy} each version has one"
        help = "choose syncps or diloco, or more contributions to an update"
        settings.report("scorer", message, "updates.scorer.enabled", contributions(settings)[1], help=help)


@rule("updates.scorer.enabled", "task.kind", "model.kind")
def a_score_is_a_loss_of_the_whole_model(settings: Settings, scored: bool, task: str, model: str) -> None:
    measures = Task.kinds[task].measures
    if scored and measures and "loss" not in measures:
        message = f"a score is a loss on held-out data, and the task {task} has none"
        settings.report("scorer", message, "updates.scorer.enabled", "task.kind", help="leave it out")
    if scored and model == "moe":
        message = "workers may hold some of a mixture's experts, and such contributions cannot be measured alone"
        settings.report("scorer", message, "updates.scorer.enabled", "model.kind", help="leave it out, or choose an aggregation rule")


@rule("updates.experts_apart", "model.kind")
def only_a_mixture_has_experts_to_compare(settings: Settings, apart: bool, model: str) -> None:
    if apart and model != "moe":
        message = f"a model of the kind {model} has no experts that a rule could look at"
        settings.report("experts", message, "updates.experts_apart", "model.kind", help="set updates.experts_apart to false")


@rule("updates.experts_apart", "updates.aggregation.kind", "updates.mixing.kind")
def columns_are_apart_already(settings: Settings, apart: bool, kind: str, mixing: str) -> None:
    if apart and Aggregation.kinds[kind].by_column and mixing != "nearest-neighbours":
        settings.warn_no_effect("updates.experts_apart", f"the rule {kind} looks at each number by itself")


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
    """With too few workers a robust rule is only a mean."""
    count, path = contributions(settings)
    known = {path: count, "cluster.num_workers": workers}
    few = min((number for number in known.values() if number is not None), default=None)
    if few is None or strategy == "local" or few >= aggregation.works_from:
        return
    where = next(path for path, number in known.items() if number == few)
    message = f"with contributions of {few} workers, {aggregation.kind} gives no protection: it needs {aggregation.works_from}"
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


@rule("coordinator.held_in", "model.kind", "strategy.kind", "updates.memory", "updates.scorer.enabled")
def contributions_can_wait_in_files(
    settings: Settings, held_in: str | None, model: str, strategy: str, memory: float | None, scored: bool
) -> None:
    if held_in != "file":
        return
    for wrong, path, why in (
        (model == "moe", "model.kind", "a worker may hold some experts of a mixture only"),
        (strategy == "rollouts", "strategy.kind", "rollouts are answers, not updates"),
        (bool(memory), "updates.memory", "a mean of each worker's contributions stays in memory"),
        (scored, "updates.scorer.enabled", "a measurement compares all of a round, decoded"),
    ):
        if wrong:
            settings.report("held-in", f"these contributions cannot wait in files: {why}", "coordinator.held_in", path)
    if strategy == "local":
        settings.warn_no_effect("coordinator.held_in", "this run has no contributions", "strategy.kind")
