"""Updates: clipping, privacy, codecs, aggregation rules."""

from functools import cached_property
from typing import Annotated, Any, ClassVar, Literal, Union

from shoal.config.fields import (
    Decay,
    NonNegativeFloat,
    NonNegativeInt,
    NumberBounds,
    PositiveFloat,
    PositiveInt,
    PositiveShare,
    Section,
    Share,
)
from shoal.config.parts import Part

ChunkLength = Annotated[int, NumberBounds(at_least=64, at_most=65536)]


class Codec(Part, noun="codec"):
    """How an update is encoded for the network. Built by a function of the settings, which returns a `Coder`."""

    sparse: ClassVar[bool] = False
    """Whether most numbers are left out, so that the updates of two workers hardly overlap."""

    @cached_property
    def coder(self) -> Any:
        """The encoder and decoder with these settings."""
        return self.builder()(self)

    def for_weights(self) -> "Codec":
        """The codec for differences of weights, which are dense even where updates are sparse."""
        return self


class NoCodec(Codec, built_by="shoal.updates.codecs.dense:PlainCoder"):
    """32-bit floats as they are."""

    kind: Literal["none"] = "none"


class DenseCodec(Codec, shared=True):
    """Settings of the codecs that round every number."""

    error_feedback: bool = True
    """Error feedback: the rounding error is added to the next update."""


class Fp16Codec(DenseCodec, built_by="shoal.updates.codecs.dense:blockwise"):
    """16-bit floats: half the bytes."""

    kind: Literal["fp16"] = "fp16"


class Int8Codec(DenseCodec, built_by="shoal.updates.codecs.dense:blockwise"):
    """8-bit integers with a scale per chunk: a quarter of the bytes."""

    kind: Literal["int8"] = "int8"


class Int4Codec(DenseCodec, built_by="shoal.updates.codecs.dense:blockwise"):
    """4-bit integers with a scale per chunk: about an eighth of the bytes. For updates of many inner steps (diloco)."""

    kind: Literal["int4"] = "int4"


class TernaryCodec(DenseCodec, built_by="shoal.updates.codecs.dense:blockwise"):
    """−1, 0 or 1 times a scale per chunk: a twentieth of the bytes. For updates of many inner steps (diloco)."""

    kind: Literal["ternary"] = "ternary"


class TopKCodec(Codec, built_by="shoal.updates.codecs.topk:TopKCoder"):
    """Only the values that are largest in magnitude."""

    kind: Literal["topk"] = "topk"
    sparse = True
    ratio: PositiveShare = 0.01
    """Share of the values that is kept."""
    chunk: ChunkLength | None = None
    """Values in a chunk: this share of every chunk is kept, as in SparseLoCo (4096), also of the weights on the way back.

    Null: the largest of the whole update; the weights on the way back are dense.
    """
    values: Literal["float32", "int8", "int4", "ternary", "2-bit"] = "float32"
    """Encoding of the kept values, and of the weights on the way back: float32, as the codec of that name, or a sign and one of two
    magnitudes of the chunk (2-bit; needs `chunk`)."""
    error_feedback: bool = True
    """Error feedback: values that were left out are added to the next update."""
    error_decay: PositiveShare = 1.0
    """Factor of the left-out values from one update to the next; below 1 they fade."""

    def for_weights(self) -> Codec:
        if self.chunk:
            return TopKCodec(ratio=self.ratio, chunk=self.chunk, values=self.values)
        return Codec.kinds["none" if self.values == "float32" else self.values]()


class Aggregation(Part, noun="aggregation rule"):
    """How contributions become one update. Built by a function of the settings and `Contributions`, which returns the update."""

    withstands: ClassVar[tuple[int, int] | None] = None
    """(a, b): the rule withstands f = `byzantine` false contributions among a·f + b; None: one contribution is enough."""
    by_column: ClassVar[bool] = False
    """Whether the rule works coordinate by coordinate."""
    works_from: ClassVar[int] = 1
    """Least number of workers with which it withstands a false contribution; with fewer it is no better than the mean."""


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
    """Share that is dropped, half at each end, and with three or more contributions at least one at each end. 0: none."""


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
    """Most iterations; their cost does not depend on the size of the model."""
    smoothing: PositiveShare = 1e-6
    """Smallest distance, as a share of the median distance."""


class Selection(Aggregation, shared=True):
    """Settings of the rules that choose contributions by their distances."""

    withstands = (2, 3)
    byzantine: NonNegativeInt | None = None
    """f, the false contributions to withstand; null: a quarter of the contributions, or as many as the rule can withstand."""


class Krum(Selection, built_by="shoal.updates.rules.aggregation:by_krum"):
    """The contribution closest to its neighbours; needs 2f+3 contributions."""

    kind: Literal["krum"] = "krum"


class MultiKrum(Selection, built_by="shoal.updates.rules.aggregation:by_krum"):
    """The mean of the contributions closest to their neighbours; needs 2f+3 contributions."""

    kind: Literal["multi-krum"] = "multi-krum"
    select: PositiveInt | None = None
    """Contributions that are averaged; null: all but f."""


class Bulyan(Selection, built_by="shoal.updates.rules.aggregation:by_bulyan"):
    """Repeated Krum, then a trimmed mean of the chosen contributions; needs 4f+3 contributions."""

    kind: Literal["bulyan"] = "bulyan"
    withstands = (4, 3)


class CenteredClipping(Aggregation, built_by="shoal.updates.rules.aggregation:by_centered_clipping"):
    """The last update plus the mean of the clipped differences to it; a false contribution counts no more than the radius."""

    kind: Literal["centered-clipping"] = "centered-clipping"
    radius: PositiveFloat = 10.0
    """Largest distance of a contribution from the last update; longer ones are clipped."""
    iterations: PositiveInt = 3
    """Iterations, each around the result of the last one."""


class NoMixing(Section):
    """Contributions unchanged."""

    kind: Literal["none"] = "none"


class Bucketing(Section):
    """Contributions are replaced by means of random buckets, so that differing honest ones become more alike."""

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
    """What is clipped: whole contributions, or every sample's gradient, which is slower and needs far less noise."""
    noise_multiplier: NonNegativeFloat = 1.0
    """Standard deviation of the noise, as a multiple of clip_norm (with unit sample, on the sum over the samples)."""
    delta: PositiveShare = 1e-5
    """δ at which ε is reported."""
    protects_up_to: ClassVar[float] = 10.0
    """Largest ε that counts as protection: at e¹⁰ an attacker is 22,000 times surer that a sample was present."""

    @classmethod
    def protects(cls, spent: float) -> bool:
        """Whether this ε counts as protection."""
        return spent <= cls.protects_up_to


class Scorer(Section):
    """The coordinator measures whether contributions lower the loss on held-out data; those that do not count less, or not at all.

    It is meant for workers that send what costs them nothing: zeros, noise, copies of others' updates, or their own old ones. The loss of
    evaluations is then no longer that of data without any influence on the run, since the same held-out data is used.
    """

    enabled: bool = False
    share: PositiveShare = 0.25
    """Share of the rounds that are measured, chosen at random; and every round in which a worker contributes for the first time."""
    batches: PositiveInt = 2
    """Held-out batches of a measurement, drawn at random; each is computed once for every contribution."""
    memory: Decay = 0.8
    """Momentum of a worker's score, the running mean of its improvements relative to the round's median."""
    kept: NonNegativeInt = 2
    """Measured rounds whose weights and contributions stay in the run's folder, for `shoal audit --scores`; the newest ones."""


class Updates(Section):
    """How contributions are clipped, encoded and combined."""

    clip_norm: PositiveFloat | None = None
    """Largest L2 norm of a contribution; null: no limit."""
    privacy: Privacy = Privacy()
    codec: Codec = NoCodec()
    mixing: Mixing = NoMixing()
    aggregation: Aggregation = Mean()
    memory: Decay | None = None
    """Momentum of each worker's contributions before the rule compares them; null: 0.9 for top-k updates under a robust rule, else 0.

    The largest 1 % of two workers hardly overlap, so a rule that compares coordinates would mostly see zeros without it.
    """
    experts_apart: bool = False
    """In a mixture, apply the rule to each expert separately, and once to all other weights.

    The rule then also finds a contribution that is false in one expert only. A radius (centered-clipping) holds for each part.
    """
    scorer: Scorer = Scorer()
    below_quorum: Literal["wait", "stop"] = "wait"
    """What to do when too few workers are left for the aggregation rule."""

    @property
    def compares(self) -> bool:
        """Whether the rule compares contributions of different workers."""
        return self.aggregation.kind != "mean" or self.mixing.kind != "none"
