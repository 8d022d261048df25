"""What happens to an update on its way: clipped, made private, encoded, combined."""

from typing import Literal, Union

from shoal.config.fields import NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveShare, Section, Share


class NoCodec(Section):
    """32-bit floats as they are."""

    kind: Literal["none"] = "none"


class Fp16Codec(Section):
    """16-bit floats: half the bytes."""

    kind: Literal["fp16"] = "fp16"


class Int8Codec(Section):
    """8-bit integers with a scale per chunk: a quarter of the bytes."""

    kind: Literal["int8"] = "int8"
    error_feedback: bool = True
    """What rounding lost is added to the next update."""


class TopKCodec(Section):
    """Only the largest values."""

    kind: Literal["topk"] = "topk"
    ratio: PositiveShare = 0.01
    """Share of the values that is kept."""
    error_feedback: bool = True
    """What was left out is added to the next update."""


Codec = Union[NoCodec, Fp16Codec, Int8Codec, TopKCodec]


class Mean(Section):
    """The mean, weighted by samples. One false contribution can move it anywhere."""

    kind: Literal["mean"] = "mean"


class TrimmedMean(Section):
    """The mean without the extremes, per coordinate."""

    kind: Literal["trimmed-mean"] = "trimmed-mean"
    trim_ratio: Share = 0.3
    """Share that is dropped, half of it at each end."""


class Krum(Section):
    """The contribution closest to its neighbours; needs 2f+3 contributions."""

    kind: Literal["krum"] = "krum"
    byzantine: NonNegativeInt | None = None
    """f, the false contributions to withstand; null: a quarter of the contributions."""


class Bulyan(Section):
    """Krum again and again, then a trimmed mean of what it chose; needs 4f+3 contributions."""

    kind: Literal["bulyan"] = "bulyan"
    byzantine: NonNegativeInt | None = None
    """f, the false contributions to withstand; null: a quarter of the contributions."""


Aggregation = Union[Mean, TrimmedMean, Krum, Bulyan]


class Privacy(Section):
    """Differential privacy: Gaussian noise on every clipped contribution."""

    enabled: bool = False
    noise_multiplier: NonNegativeFloat = 1.0
    """Standard deviation of the noise, as a multiple of clip_norm."""
    delta: PositiveShare = 1e-5
    """δ at which ε is reported."""


class Updates(Section):
    """What happens to a contribution between worker and weights."""

    clip_norm: PositiveFloat | None = None
    """L2 norm over a whole contribution; null: no limit."""
    privacy: Privacy = Privacy()
    codec: Codec = NoCodec()
    aggregation: Aggregation = Mean()
    below_quorum: Literal["wait", "stop"] = "wait"
    """When too few workers are left for the aggregation rule."""
