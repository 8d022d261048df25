"""Between workers: how updates become new weights."""

from collections.abc import Mapping
from typing import Any, ClassVar, Literal

from shoal.config.fields import (
    EMPTY,
    AtLeastOne,
    Decay,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    PositiveShare,
    Section,
)
from shoal.config.parts import Part
from shoal.config.schema.training import OptimizerName


class Strategy(Part, noun="strategy"):
    """Between workers: how updates become new weights. Built by a function of the run and of the number of workers expected."""

    update_from: ClassVar[str] = "cluster.num_workers"
    """The setting that says how many contributions make an update; `strategy.kind`: one of them does."""
    mean_of_one: ClassVar[bool] = False
    """Whether each contribution is an update of its own where the rule is the mean."""
    takes_tasks: ClassVar[bool] = False
    """Whether a scheduler can tell workers after every step which task to go on with."""
    leases_units: ClassVar[bool] = False
    """Whether workers lease units of the data, so that every sample of an epoch is learned from, or given up by name."""
    gives_answers: ClassVar[bool] = False
    """Whether workers answer prompts, and the coordinator learns from the answers: for tasks that need prompts, and for no others."""

    @classmethod
    def worth_trying(cls, workers: int) -> tuple[Mapping[str, Any], ...]:
        """Settings of this strategy that `shoal plan` tries for so many workers, besides the kind; none: it tries something else."""
        return ()


class Local(Strategy):
    """Nobody else: one worker."""

    kind: Literal["local"] = "local"
    update_from = "strategy.kind"


class WorkUnits(Strategy, built_by="shoal.strategies.workunits:policies"):
    """Workers lease units of the data; N results make an update."""

    kind: Literal["workunits"] = "workunits"
    update_from = "strategy.units_per_update"
    leases_units = True
    batches_per_unit: PositiveInt = 10
    """A unit is batch_size × batches_per_unit samples."""
    units_per_update: PositiveInt = 3
    """Results to wait for before the weights move."""
    lease_timeout_s: PositiveFloat = 300.0
    """Seconds without a sign of life from who computes a unit, before it goes to somebody else."""
    max_retries: PositiveInt = 3
    """Attempts at a unit, in all, before it is given up."""

    @classmethod
    def worth_trying(cls, workers: int) -> tuple[Mapping[str, Any], ...]:
        return ({"units_per_update": workers},)


class Rollouts(Strategy, built_by="shoal.strategies.rollouts:policies"):
    """Workers answer prompts that they lease; the coordinator checks the answers, scores them and learns from them (the task `ppo`)."""

    kind: Literal["rollouts"] = "rollouts"
    update_from = "strategy.kind"
    leases_units = True
    gives_answers = True
    prompts_per_unit: PositiveInt = 4
    """Prompts that a worker leases at a time."""
    max_lag: NonNegativeInt = 2
    """Versions that may be made while a worker answers, before its answers are too old."""
    inexact_share: PositiveShare = 0.02
    """Share of a worker's tokens, over its last units, that may be other ones than the draws give at the coordinator. Numbers that were
    rounded otherwise give another token now and then; whoever computes with other weights, at another temperature, or chooses among
    answers gives more."""
    lease_timeout_s: PositiveFloat = 300.0
    """Seconds without a sign of life from who answers a unit, before it goes to somebody else."""
    max_retries: PositiveInt = 5
    """Attempts at a unit, in all, before it is given up."""


class Edp(Strategy, built_by="shoal.strategies.edp:policies"):
    """Elastic and asynchronous: every gradient is applied on arrival, weighted by 1/(1+lag)."""

    kind: Literal["edp"] = "edp"
    takes_tasks = True
    mean_of_one = True
    pull_every_steps: PositiveInt = 10
    """Steps between pulls of the weights. Workers drift apart between pulls: at 10 a small GPT's loss was 23 % above that of one process.
    The more gradients lag, the smaller the learning rate that they bear."""
    look_ahead: bool | None = None
    """As under async; null: where workers pull at every step. Between pulls their own steps lead them elsewhere."""

    @classmethod
    def worth_trying(cls, workers: int) -> tuple[Mapping[str, Any], ...]:
        return ({"pull_every_steps": 1}, {"pull_every_steps": 10})


class SyncPs(Strategy, built_by="shoal.strategies.syncps:policies"):
    """Synchronous parameter server: a round closes when every live worker has sent, or at the deadline."""

    kind: Literal["syncps"] = "syncps"
    takes_tasks = True
    pull_every_steps: PositiveInt = 1
    """Steps between pulls of the weights."""
    round_timeout_s: PositiveFloat = 30.0
    """Seconds after the first contribution at which a round closes without the late ones."""
    window: PositiveInt = 1
    """Rounds a worker may be ahead of the slowest before it waits; 1 is a strict barrier."""

    @classmethod
    def worth_trying(cls, workers: int) -> tuple[Mapping[str, Any], ...]:
        return ({},)


class Async(Strategy, built_by="shoal.strategies.asynchronous:policies"):
    """Bounded staleness: a contribution that lags too many versions is rejected."""

    kind: Literal["async"] = "async"
    takes_tasks = True
    update_from = "strategy.contributions_per_update"
    max_staleness: NonNegativeInt = 50
    """Versions a contribution may lag."""
    adaptive: bool = True
    """A bound for each worker: max_staleness divided by its speed against the median."""
    min_staleness: NonNegativeInt | None = None
    """Least bound of any worker; null: 5, or max_staleness if that is less."""
    max_staleness_multiplier: PositiveFloat = 10.0
    """Largest bound, as a multiple of max_staleness."""
    contributions_per_update: PositiveInt = 1
    """Contributions that make an update, whoever sent them.

    A rule that compares waits for as many different workers, or all that are here; several of one worker are averaged into its one row.
    """
    look_ahead: bool = True
    """Workers compute where the weights will be when their gradient arrives, as far as the last versions tell.

    It changes the result: it halves what lag costs. Files of dialects, whose documents know nothing of it, have it off unless told.
    """

    @classmethod
    def worth_trying(cls, workers: int) -> tuple[Mapping[str, Any], ...]:
        return ({}, {"contributions_per_update": workers}) if workers > 1 else ({},)


class OuterOptimizer(Section):
    """What moves the shared weights, once a round."""

    name: OptimizerName = "SGD"
    """Class name in torch.optim."""
    learning_rate: PositiveFloat = 0.7
    """Step size, before the outer schedule."""
    momentum: Decay = 0.9
    """Passed to an optimizer that takes it."""
    nesterov: bool = True
    """Passed to an optimizer that takes it."""
    kwargs: Mapping[str, Any] = EMPTY
    """Further arguments, passed as they are."""


class DiLoCo(Strategy, built_by="shoal.strategies.diloco:policies"):
    """Each worker takes many steps alone; the outer optimizer applies the mean of what they moved."""

    kind: Literal["diloco"] = "diloco"
    inner_steps: PositiveInt = 500
    """Steps of each worker in a round."""
    rounds: PositiveInt | None = None
    """Outer steps; null: as many as training.max_steps or the epochs need, else 10."""
    outer: OuterOptimizer = OuterOptimizer()
    outer_schedule: Literal["constant", "cosine", "linear", "polynomial"] = "constant"
    """The outer learning rate over the rounds."""
    outer_clip_norm: PositiveFloat | None = None
    """Limit on the norm of the outer gradient; null: none."""
    round_timeout_s: PositiveFloat = 600.0
    """Seconds after the first contribution at which a round closes without the late ones."""
    quorum: PositiveInt | None = None
    """Contributions with which a round may close before all have sent; 1: each is applied when it arrives. null: it waits for all."""
    grace_s: NonNegativeFloat = 0.0
    """Seconds that a round with its quorum stays open for the others."""
    late: Literal["drop", "weigh"] = "drop"
    """What becomes of a contribution whose round has closed: nothing, or it goes into the next one, weighed 1/(1+lag)."""
    balance_speeds: bool = False
    """A slower worker takes fewer steps (an eighth at least), so that all need about the same time; what each learned from counts."""
    fragments: PositiveInt = 1
    """Parts of the model that take turns: each is exchanged once in inner_steps, and only a part is ever on its way."""
    overlap_steps: NonNegativeInt = 0
    """Steps that a worker goes on while what it sent is on its way; 0: it waits."""
    overlap_blend: PositiveShare = 0.5
    """Share of the new weights in the worker's own, where it went on meanwhile; else they replace them."""
    expert_weight_cap: AtLeastOne | None = None
    """In a mixture, each expert's outer gradient is weighed by the tokens that it saw at a worker, which the worker reports.

    No contribution counts more in an expert than this many times its share in the plain mean. null: the plain mean.
    """

    @classmethod
    def worth_trying(cls, workers: int) -> tuple[Mapping[str, Any], ...]:
        plain = tuple({"inner_steps": steps} for steps in (1, 10, 50, 100, 500))
        if workers < 3:  # one of two is no quorum: each update would be one worker's
            return plain
        quorum = {"quorum": workers * 3 // 4, "late": "weigh"}
        uneven = tuple({"inner_steps": steps, **other} for steps in (50, 500) for other in ({"balance_speeds": True}, quorum))
        return plain + uneven
