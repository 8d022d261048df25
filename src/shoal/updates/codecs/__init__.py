"""How an update travels: as frames of bytes, and back.

What a codec loses may be kept in a residual and added to the next update (error feedback): the sum of what arrives then follows the sum
of what was sent. Frames come from strangers: their lengths must be exactly what the codec and the size say, and no more than `size`
numbers are ever allocated. A vector to encode must be finite (`clipping.norm` tells); what is not finite is refused on arrival.

    none   values <f4                        fp16   values <f2, saturated
    int8   scales <f4 per chunk, values i1   int4   scales <f4 per chunk, two values in a byte
    topk   packed positions, values as in none, int8, int4 or ternary
    ternary   scales <f4 per chunk, five values in a byte
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from shoal.config.schema.updates import Codec, NoCodec
from shoal.protocol.frames import Frame, Frames, UpdateError, frame_of
from shoal.updates.codecs import sparse

__all__ = [
    "Frames",
    "UpdateError",
    "apply_changes",
    "borrow",
    "decode",
    "decode_into",
    "encode",
    "encode_changes",
    "encoded_bytes",
    "of_weights",
    "renew",
    "residual_for",
]


def residual_for(codec: Codec, size: int) -> Tensor | None:
    """Where the codec is to keep what it loses: zeros; None where it loses nothing, or error feedback is off."""
    return torch.zeros(size) if getattr(codec, "error_feedback", False) else None


def encode(codec: Codec, vector: Tensor, residual: Tensor | None) -> Frames:
    """The frames of a vector, which stays as it is. `residual` is added first, and becomes what was lost.

    Without a codec the frame shares the vector's memory: send it before the vector changes.
    """
    frames: Frames = codec.coder.encode(vector.detach().numpy(), None if residual is None else residual.numpy())
    return frames


def decode(codec: Codec, size: int, frames: Sequence[Frame], out: Tensor | None = None) -> Tensor:
    """The vector in the frames, in `out` where that is given (which holds anything at all after an error)."""
    vector = torch.empty(size) if out is None else out
    codec.coder.decode(size, frames, vector.numpy())
    return vector


def borrow(codec: Codec, size: int, frames: Sequence[Frame]) -> Tensor | None:
    """The vector in the frames where it lies, for reading only; None where it does not lie there as it is needed. Raises UpdateError."""
    values = codec.coder.borrow(size, frames)
    return None if values is None else torch.from_numpy(values)


def decode_into(codec: Codec, size: int, frames: Sequence[Frame], target: Tensor, scale: float, own: bool = False) -> None:
    """`target += scale × decoded`. Everything is checked before anything is added, so an error leaves the target as it was.
    `own`: the frames were made here, so there is nothing to check."""
    codec.coder.add(size, frames, target.numpy(), scale, own)


def encoded_bytes(codec: Codec, size: int) -> int:
    """The most bytes an encoded vector takes."""
    most: int = codec.coder.most_bytes(size)
    return most


def encode_changes(old: Tensor, new: Tensor) -> Frames | None:
    """What turns `old` into `new`, to the bit; None where that is not smaller than `new` itself."""
    found = sparse.differences(old.detach().numpy(), new.detach().numpy())
    if found is None:
        return None
    positions, values = found
    frames = sparse.pack(positions, len(new)), frame_of(values)
    return frames if sum(frame.nbytes for frame in frames) < 4 * len(new) else None


def apply_changes(vector: Tensor, frames: Sequence[Frame]) -> None:
    """Turn the old vector into the new one, in place. An error leaves it as it was."""
    positions, values = sparse.read(frames, len(vector))
    vector.numpy()[positions] = values


def of_weights(codec: Codec) -> Codec:
    """What shortens differences of weights, which may have moved everywhere, where updates are shortened by `codec`."""
    return codec.for_weights()


def renew(weights: Tensor, kind: str, codec: Codec, frames: Sequence[Frame], own: bool = False) -> None:
    """Older weights become newer ones, in place, by what was published: `full` ones, `changes`, or a `difference`. `own`: as above."""
    if kind == "full":
        decode(NoCodec(), weights.numel(), frames, out=weights)
    elif kind == "changes":
        apply_changes(weights, frames)
    else:
        decode_into(of_weights(codec), weights.numel(), frames, weights, 1.0, own)
