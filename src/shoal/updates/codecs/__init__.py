"""Codecs: how an update is encoded as frames of bytes, and decoded.

With error feedback, a codec keeps what it lost in a residual and adds it to the next update, so that the sum of what is received follows
the sum of what was encoded. Received frames are untrusted: their lengths must be exactly what the codec and the size say, and at most
`size` numbers are allocated. A vector to encode must be finite (see `clipping.norm`); decoding refuses values that are not finite.

    none   values <f4                        fp16   values <f2, saturated
    int8   scales <f4 per chunk, values i1   int4   scales <f4 per chunk, two values in a byte
    topk   packed positions, values as in none, int8, int4 or ternary, or scales <u2 and values of two bits
    ternary   scales <f4 per chunk, five values in a byte
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from shoal.config.schema.updates import Codec, NoCodec
from shoal.protocol.frames import Frame, Frames, UpdateError, frame_of
from shoal.updates.codecs import sparse_packing

__all__ = [
    "PLAIN",
    "UpdateError",
    "apply_changes",
    "borrow",
    "decode",
    "decode_into",
    "encode",
    "encode_changes",
    "encoded_bytes",
    "renew",
    "residual_for",
]

PLAIN = NoCodec()
"""For what always travels as 32-bit numbers, such as buffers and full weights."""


def residual_for(codec: Codec, size: int) -> Tensor | None:
    """A zero residual for error feedback; None where the codec is lossless or error feedback is off."""
    return torch.zeros(size) if getattr(codec, "error_feedback", False) else None


def encode(codec: Codec, vector: Tensor, residual: Tensor | None) -> Frames:
    """The frames of a vector, which is not changed. `residual` is added first, and becomes what was lost.

    Without a codec the frame shares the vector's memory: send it before the vector changes.
    """
    return codec.coder.encode(vector.detach().numpy(), None if residual is None else residual.numpy())


def decode(codec: Codec, size: int, frames: Sequence[Frame], out: Tensor | None = None) -> Tensor:
    """The vector in the frames, in `out` where that is given (whose content is undefined after an error)."""
    vector = torch.empty(size) if out is None else out
    codec.coder.decode(size, frames, vector.numpy())
    return vector


def borrow(codec: Codec, size: int, frames: Sequence[Frame]) -> Tensor | None:
    """The vector as a read-only view of the frames; None where a view is not possible. Raises UpdateError."""
    values = codec.coder.borrow(size, frames)
    return None if values is None else torch.from_numpy(values)


def decode_into(codec: Codec, size: int, frames: Sequence[Frame], target: Tensor, scale: float, own: bool = False) -> None:
    """`target += scale × decoded`. Everything is checked before anything is added, so an error leaves the target unchanged. `own`: the
    frames were encoded by this process and need no check."""
    codec.coder.add(size, frames, target.numpy(), scale, own)


def encoded_bytes(codec: Codec, size: int) -> int:
    """Largest size of an encoded vector, in bytes."""
    return codec.coder.most_bytes(size)


def encode_changes(old: Tensor, new: Tensor) -> Frames | None:
    """The exact difference between two vectors; None where it is not smaller than `new` itself."""
    found = sparse_packing.differences(old.detach().numpy(), new.detach().numpy())
    if found is None:
        return None
    positions, values = found
    frames = sparse_packing.pack(positions, len(new)), frame_of(values)
    return frames if sum(frame.nbytes for frame in frames) < 4 * len(new) else None


def apply_changes(vector: Tensor, frames: Sequence[Frame]) -> None:
    """Turn the old vector into the new one, in place. An error leaves it unchanged."""
    positions, values = sparse_packing.read(frames, len(vector))
    vector.numpy()[positions] = values


def renew(weights: Tensor, kind: str, codec: Codec, frames: Sequence[Frame], own: bool = False) -> None:
    """Update weights in place from published frames: `full` weights, exact `changes`, or an encoded `difference`. `own`: as above."""
    if kind == "full":
        decode(PLAIN, weights.numel(), frames, out=weights)
    elif kind == "changes":
        apply_changes(weights, frames)
    else:
        decode_into(codec.for_weights(), weights.numel(), frames, weights, 1.0, own)
