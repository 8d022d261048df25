"""A codec: of every number only its sign travels, with one scale for all of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import numpy as np

from shoal.plugins import Codec, Coder, Floats, Frame, Frames, builds, expect_frames, frame_of, values_of


class Sign(Codec):
    """Signs and one scale: a thirty-second of the bytes."""

    kind: Literal["sign"] = "sign"
    error_feedback: bool = True
    """What was lost is added to the next update."""


@builds(Sign)
class SignCoder(Coder):
    def __init__(self, settings: Sign) -> None:
        pass

    def pack(self, values: Floats) -> Frames:
        scale = np.abs(values).mean(keepdims=True, dtype=np.float32) if len(values) else np.zeros(1, np.float32)
        return frame_of(scale), frame_of(np.packbits(values >= 0))

    def unpack(self, size: int, frames: Sequence[Frame]) -> Floats:
        expect_frames(len(frames), 2)
        scale = values_of(frames[0], "<f4", 1, "a scale")
        bits = values_of(frames[1], "u1", -(-size // 8), "signs")
        return (np.unpackbits(bits, count=size).astype(np.float32) * 2 - 1) * scale

    def most_bytes(self, size: int) -> int:
        return 4 + -(-size // 8)
