"""Strategies: how workers' updates become new weights."""

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
    """How workers' updates become new weights. Built by a function of the run and the expected number of workers: it returns `Policies`."""

    update_from: ClassVar[str] = "cluster.num_workers"
    """The setting with the number of contributions per update; `strategy.kind`: one contribution."""
    mean_of_one: ClassVar[bool] = False
    """Whether each contribution is an update by itself under the rule mean."""
    takes_tasks: ClassVar[bool] = False
    """Whether a scheduler can assign another task to a worker after every step."""
    leases_units: ClassVar[bool] = False
    """Whether workers lease units: every sample of an epoch is then learned from or reported as given up."""
    gives_answers: ClassVar[bool] = False
    """Whether workers send answers to prompts, from which the coordinator learns; only for tasks that need prompts."""
    default_workers: ClassVar[int] = 0
    """Workers that `shoal train` starts if their number is not given; 0: the user must give it."""

    @classmethod
    def worth_trying(cls, workers: int) -> tuple[Mapping[str, Any], ...]:
        """Settings of this strategy that `shoal plan` tries with this number of workers; none: it does not try the strategy."""
        return ()


class Local(Strategy):
    """One worker, without a coordinator."""

    kind: Literal["local"] = "local"
    update_from = "strategy.kind"


class WorkUnits(Strategy, built_by="shoal.strategies.workunits:policies"):
    """Workers lease units of the data; `units_per_update` results make an update."""

    kind: Literal["workunits"] = "workunits"
    update_from = "strategy.units_per_update"
    leases_units = True
    batches_per_unit: PositiveInt = 10
    """A unit is batch_size × batches_per_unit samples."""
    units_per_update: PositiveInt = 3
    """Results that make an update."""
    max_lag: NonNegativeInt | None = None
    """Most versions that may be made while a worker computes a unit. Its result then counts 1/(1+lag) in the round in which it arrives; an
    older one is dropped, and its unit is done again. null: the larger of 2 and four times the number of workers over `units_per_update`,
    rounded up, so that a worker may be some times slower than the others; 0: every result of an older version is dropped."""
    lease_timeout_s: PositiveFloat = 300.0
    """Seconds without a heartbeat after which a unit is leased to another worker."""
    max_retries: PositiveInt = 3
    """Attempts at a unit before it is given up."""

    @classmethod
    def worth_trying(cls, workers: int) -> tuple[Mapping[str, Any], ...]:
        return ({"units_per_update": workers},)


class Rollouts(Strategy, built_by="shoal.strategies.rollouts:policies"):
    """Workers lease prompts and answer them; the coordinator checks and scores the answers and learns from them (task `ppo`)."""

    kind: Literal["rollouts"] = "rollouts"
    update_from = "strategy.kind"
    leases_units = True
    gives_answers = True
    prompts_per_unit: PositiveInt = 4
    """Prompts that a worker leases at a time."""
    max_lag: NonNegativeInt = 2
    """Most versions that may be made while a worker answers; older answers are rejected."""
    inexact_share: PositiveShare = 0.02
    """Largest share of a worker's tokens, over its last units, that may differ from the coordinator's own draws. Different rounding
    changes a token now and then; other weights, another temperature or selected answers change more."""
    lease_timeout_s: PositiveFloat = 300.0
    """Seconds without a heartbeat after which a unit is leased to another worker."""
    max_retries: PositiveInt = 5
    """Attempts at a unit before it is given up."""


class Edp(Strategy, built_by="shoal.strategies.edp:policies"):
    """Elastic and asynchronous: every gradient is applied on arrival, weighted by 1/(1+lag)."""

    kind: Literal["edp"] = "edp"
    takes_tasks = True
    mean_of_one = True
    pull_every_steps: PositiveInt = 10
    """Steps between pulls of the weights. Workers drift apart between pulls: at 10 a small GPT's loss was 23 % above that of one process.
    The more gradients lag, the smaller the learning rate must be."""
    look_ahead: bool | None = None
    """As for async; null: only if workers pull at every step, because own steps between pulls lead elsewhere."""

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
    """Rounds that a worker may be ahead of the slowest one; 1 is a strict barrier."""

    @classmethod
    def worth_trying(cls, workers: int) -> tuple[Mapping[str, Any], ...]:
        return ({},)


class Async(Strategy, built_by="shoal.strategies.asynchronous:policies"):
    """Bounded staleness: a contribution that lags too far is rejected."""

    kind: Literal["async"] = "async"
    takes_tasks = True
    update_from = "strategy.contributions_per_update"
    max_staleness: NonNegativeInt = 50
    """Most versions that a contribution may lag."""
    adaptive: bool = True
    """A separate bound for each worker: max_staleness divided by its speed relative to the median."""
    min_staleness: NonNegativeInt | None = None
    """Least bound of any worker; null: 5, or max_staleness if that is less."""
    max_staleness_multiplier: PositiveFloat = 10.0
    """Largest bound, as a multiple of max_staleness."""
    contributions_per_update: PositiveInt = 1
    """Contributions that make an update, from any workers.

    A robust rule waits for this many different workers, or for all present; several contributions of one worker are averaged first.
    """
    look_ahead: bool = True
    """Workers compute gradients at the weights that they predict for the time of arrival, from the last versions.

    This halves the cost of lag and changes the result. In dialect files it is off by default, since their documents do not know it.
    """

    @classmethod
    def worth_trying(cls, workers: int) -> tuple[Mapping[str, Any], ...]:
        return ({}, {"contributions_per_update": workers}) if workers > 1 else ({},)


class OuterOptimizer(Section):
    """The outer optimizer, which steps once a round."""

    name: OptimizerName = "SGD"
    """Class name in torch.optim."""
    learning_rate: PositiveFloat = 0.7
    """Step size, before the outer schedule."""
    momentum: Decay = 0.9
    """Used if the optimizer takes it."""
    nesterov: bool = True
    """Used if the optimizer takes it."""
    kwargs: Mapping[str, Any] = EMPTY
    """Further arguments, passed as they are."""


class DiLoCo(Strategy, built_by="shoal.strategies.diloco:policies"):
    """DiLoCo: each worker takes many inner steps; the outer optimizer applies the mean of their pseudo-gradients."""

    default_workers = 1
    kind: Literal["diloco"] = "diloco"
    inner_steps: PositiveInt = 500
    """Inner steps of each worker in a round."""
    rounds: PositiveInt | None = None
    """Rounds, each with one outer step; null: as training.max_steps or the epochs require, else 10."""
    outer: OuterOptimizer = OuterOptimizer()
    outer_schedule: Literal["constant", "cosine", "linear", "polynomial"] = "constant"
    """Schedule of the outer learning rate."""
    outer_power: PositiveFloat = 2.0
    """Exponent of the polynomial outer schedule; 1 is the linear one."""
    outer_clip_norm: PositiveFloat | None = None
    """Largest norm of the mean pseudo-gradient; null: no limit."""
    round_timeout_s: PositiveFloat = 600.0
    """Seconds after the first contribution at which a round closes without the late ones."""
    quorum: PositiveInt | None = None
    """Contributions after which a round may close; 1: each is applied on arrival. null: a round waits for all workers."""
    grace_s: NonNegativeFloat = 0.0
    """Seconds that a round stays open after its quorum is reached."""
    late: Literal["drop", "weigh"] = "drop"
    """Contributions to a closed round: `drop` discards them, `weigh` adds them to the next round with weight 1/(1+lag)."""
    balance_speeds: bool = False
    """A slower worker takes fewer inner steps (at least an eighth), so that all need about the same time; weights follow the samples."""
    fragments: PositiveInt = 1
    """Fragments of the model; each is synchronised once in inner_steps, one fragment at a time (streaming DiLoCo)."""
    overlap_steps: NonNegativeInt = 0
    """Sync delay: inner steps that a worker takes while it waits for the new weights; 0: it stops meanwhile."""
    overlap_blend: PositiveShare = 0.5
    """Share of the new weights when they are blended into a worker's own; only with overlap_steps, otherwise they replace them."""
    expert_weight_cap: AtLeastOne | None = None
    """In a mixture, weigh each expert's pseudo-gradients by the tokens that it saw, as workers report them.

    No contribution counts more than this many times its share in the plain mean. null: the plain mean.
    """

    @classmethod
    def worth_trying(cls, workers: int) -> tuple[Mapping[str, Any], ...]:
        plain = tuple({"inner_steps": steps} for steps in (1, 10, 50, 100, 500))
        if workers < 3:  # one of two is no quorum: each update would be one worker's
            return plain
        quorum = {"quorum": workers * 3 // 4, "late": "weigh"}
        uneven = tuple({"inner_steps": steps, **other} for steps in (50, 500) for other in ({"balance_speeds": True}, quorum))
        return plain + uneven
