"""What happens to an update on its way: clipped, made private, encoded, combined."""

from functools import cached_property
from typing import Any, ClassVar, Literal, Union

from shoal.config.fields import Decay, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt, PositiveShare, Section, Share
from shoal.config.parts import Part


class Codec(Part, noun="codec"):
    """How an update travels: as frames of bytes, and back. Built by a function of its settings: a `shoal.updates.codecs.base.Coder`."""

    sparse: ClassVar[bool] = False
    """Whether it leaves out most of the numbers, so that the updates of two workers hardly overlap."""

    @cached_property
    def coder(self) -> Any:
        """What encodes and decodes with these settings."""
        return self.builder()(self)

    def for_weights(self) -> "Codec":
        """What shortens differences of weights, which may have moved everywhere, where this shortens updates."""
        return self


class NoCodec(Codec, built_by="shoal.updates.codecs.dense:plain"):
    """32-bit floats as they are."""

    kind: Literal["none"] = "none"


class Fp16Codec(Codec, built_by="shoal.updates.codecs.dense:half"):
    """16-bit floats: half the bytes."""

    kind: Literal["fp16"] = "fp16"
    error_feedback: bool = True
    """What rounding lost is added to the next update."""


class Int8Codec(Codec, built_by="shoal.updates.codecs.dense:eight_bits"):
    """8-bit integers with a scale per chunk: a quarter of the bytes."""

    kind: Literal["int8"] = "int8"
    error_feedback: bool = True
    """What rounding lost is added to the next update."""


class Int4Codec(Codec, built_by="shoal.updates.codecs.dense:four_bits"):
    """4-bit integers with a scale per chunk: an eighth of the bytes, near enough. For updates that many steps made."""

    kind: Literal["int4"] = "int4"
    error_feedback: bool = True
    """What rounding lost is added to the next update."""


class TernaryCodec(Codec, built_by="shoal.updates.codecs.ternary:ternary"):
    """−1, 0 or 1 times a scale per chunk: a twentieth of the bytes. For updates that many steps made."""

    kind: Literal["ternary"] = "ternary"
    error_feedback: bool = True
    """What rounding lost is added to the next update."""


class TopKCodec(Codec, built_by="shoal.updates.codecs.topk:TopKCoder"):
    """Only the largest values."""

    kind: Literal["topk"] = "topk"
    sparse = True
    ratio: PositiveShare = 0.01
    """Share of the values that is kept."""
    values: Literal["float32", "int8", "int4", "ternary"] = "float32"
    """How those travel, and weights back where most of them moved: whole, or shortened as the codec of that name does."""
    error_feedback: bool = True
    """What was left out is added to the next update."""
    error_decay: PositiveShare = 1.0
    """Share of what was left out that is still there when the next update comes; below 1 what no update confirms fades."""

    def for_weights(self) -> Codec:
        kept: Codec = Codec.kinds["none" if self.values == "float32" else self.values]()
        return kept


class Aggregation(Part, noun="aggregation rule"):
    """How contributions become one update: a function of these settings and `shoal.updates.rules.mixing.Contributions` computes it."""

    withstands: ClassVar[tuple[int, int] | None] = None
    """a and b of the a·f + b contributions that withstand f false ones, where `byzantine` is f; None: one contribution is enough."""
    by_column: ClassVar[bool] = False
    """Whether each number of the update follows from the same number of the contributions alone."""
    works_from: ClassVar[int] = 1
    """Contributions from different workers from which on it withstands a false one. With fewer it works, and is no more than the mean."""


class Mean(Aggregation, built_by="shoal.updates.rules.aggregation:by_mean"):
    """The mean, weighted by samples. One false contribution can move it anywhere."""

    kind: Literal["mean"] = "mean"
    by_column = True


class TrimmedMean(Aggregation, built_by="shoal.updates.rules.aggregation:by_trimmed_mean"):
    """The mean without the extremes, per coordinate."""

    kind: Literal["trimmed-mean"] = "trimmed-mean"
    by_column = True
    works_from = 3
    trim_ratio: Share = 0.3
    """Share that is dropped, half of it at each end; never fewer than one at each end from three contributions on. 0: none."""


class Median(Aggregation, built_by="shoal.updates.rules.aggregation:by_median"):
    """The middle value, per coordinate."""

    kind: Literal["median"] = "median"
    by_column = True
    works_from = 3


class GeometricMedian(Aggregation, built_by="shoal.updates.rules.aggregation:by_geometric_median"):
    """The point with the least sum of distances to all contributions; fewer than half of them cannot move it far."""

    kind: Literal["geometric-median"] = "geometric-median"
    works_from = 3
    iterations: PositiveInt = 100
    """Steps towards it at most; each is cheap whatever the size of the model."""
    smoothing: PositiveShare = 1e-6
    """Least distance that counts, as a share of the middle one."""


class Krum(Aggregation, built_by="shoal.updates.rules.aggregation:by_krum"):
    """The contribution closest to its neighbours; needs 2f+3 contributions."""

    kind: Literal["krum"] = "krum"
    withstands = (2, 3)
    byzantine: NonNegativeInt | None = None
    """f, the false contributions to withstand; null: a quarter of the contributions, or what they allow if that is less."""


class MultiKrum(Aggregation, built_by="shoal.updates.rules.aggregation:by_multi_krum"):
    """The mean of the contributions closest to their neighbours; needs 2f+3 contributions."""

    kind: Literal["multi-krum"] = "multi-krum"
    withstands = (2, 3)
    byzantine: NonNegativeInt | None = None
    """f, the false contributions to withstand; null: a quarter of the contributions, or what they allow if that is less."""
    select: PositiveInt | None = None
    """Contributions that are averaged; null: all but f."""


class Bulyan(Aggregation, built_by="shoal.updates.rules.aggregation:by_bulyan"):
    """Krum again and again, then a trimmed mean of what it chose; needs 4f+3 contributions."""

    kind: Literal["bulyan"] = "bulyan"
    withstands = (4, 3)
    byzantine: NonNegativeInt | None = None
    """f, the false contributions to withstand; null: a quarter of the contributions, or what they allow if that is less."""


class CenteredClipping(Aggregation, built_by="shoal.updates.rules.aggregation:by_centered_clipping"):
    """From the last update towards each contribution, by a limited length; a false one moves it no further than that."""

    kind: Literal["centered-clipping"] = "centered-clipping"
    radius: PositiveFloat = 10.0
    """The length that each contribution counts for at most, measured from the last update."""
    iterations: PositiveInt = 3
    """How often that is repeated, each time from where the last one led."""


class NoMixing(Section):
    """Each contribution as it came."""

    kind: Literal["none"] = "none"


class Bucketing(Section):
    """Means of random buckets take the contributions' place, so that honest ones that differ look more alike."""

    kind: Literal["bucketing"] = "bucketing"
    size: PositiveInt = 2
    """Contributions in a bucket."""


class NearestNeighbours(Section):
    """Each contribution is replaced by the mean of all but the f farthest from it; needs 2f+1 contributions."""

    kind: Literal["nearest-neighbours"] = "nearest-neighbours"
    withstands: ClassVar[tuple[int, int]] = (2, 1)
    byzantine: NonNegativeInt | None = None
    """f, the false contributions to withstand; null: as in the aggregation rule, else a quarter of the contributions."""


Mixing = Union[NoMixing, Bucketing, NearestNeighbours]


class Privacy(Section):
    """Differential privacy: Gaussian noise on every clipped contribution."""

    enabled: bool = False
    unit: Literal["contribution", "sample"] = "contribution"
    """What is clipped: a whole contribution, or every sample's gradient by itself, which takes longer and needs far less noise."""
    noise_multiplier: NonNegativeFloat = 1.0
    """Standard deviation of the noise, as a multiple of clip_norm (on the sum over the samples, where they are clipped by themselves)."""
    delta: PositiveShare = 1e-5
    """δ at which ε is reported."""
    protects_up_to: ClassVar[float] = 10.0
    """The largest ε that is still called protection: e¹⁰ is 22,000 times surer that a sample was there."""

    @classmethod
    def protects(cls, spent: float) -> bool:
        """Whether an ε still says that anybody is protected."""
        return spent <= cls.protects_up_to


class Updates(Section):
    """What happens to a contribution between worker and weights."""

    clip_norm: PositiveFloat | None = None
    """L2 norm over a whole contribution; null: no limit."""
    privacy: Privacy = Privacy()
    codec: Codec = NoCodec()
    mixing: Mixing = NoMixing()
    aggregation: Aggregation = Mean()
    memory: Decay | None = None
    """Share of a worker's earlier contributions in what the rule sees; null: 0.9 for top-k updates under a rule that compares, else 0.

    Two workers' largest 1 % hardly overlap, so that a rule which compares coordinates would see zeros; with a memory it sees directions.
    """
    experts_apart: bool = False
    """In a mixture, the rule looks at each expert by itself and at everything else together, not at whole contributions.

    It then finds what is false in one expert only. A radius (centered-clipping) is that of each part.
    """
    below_quorum: Literal["wait", "stop"] = "wait"
    """When too few workers are left for the aggregation rule."""

    @property
    def compares(self) -> bool:
        """Whether contributions are compared with each other, so that each worker must be one of those that are compared."""
        return self.aggregation.kind != "mean" or self.mixing.kind != "none"
