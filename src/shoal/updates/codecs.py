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

import numpy as np
import torch
from torch import Tensor

from shoal.config.schema.updates import Codec, Fp16Codec, Int4Codec, Int8Codec, NoCodec, TernaryCodec, TopKCodec
from shoal.updates import sparse, trits
from shoal.updates.blocks import Floats, all_finite, in_blocks, scratch
from shoal.updates.dense import Bytes, Dense, Half, Nibbles, Plain, chunks
from shoal.updates.frames import Frame, Frames, UpdateError, expect_frames, frame_of
from shoal.updates.trits import Trits

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

_DENSE: dict[type, type[Dense]] = {NoCodec: Plain, Fp16Codec: Half, Int8Codec: Bytes, Int4Codec: Nibbles, TernaryCodec: Trits}
_KEPT: dict[str, Codec] = {"float32": NoCodec(), "int8": Int8Codec(), "int4": Int4Codec(), "ternary": TernaryCodec()}
"""How the values travel that top-k keeps."""


def residual_for(codec: Codec, size: int) -> Tensor | None:
    """Where the codec is to keep what it loses: zeros; None where it loses nothing, or error feedback is off."""
    return None if isinstance(codec, NoCodec) or not codec.error_feedback else torch.zeros(size)


def encode(codec: Codec, vector: Tensor, residual: Tensor | None) -> Frames:
    """The frames of a vector, which stays as it is. `residual` is added first, and becomes what was lost.

    Without a codec the frame shares the vector's memory: send it before the vector changes.
    """
    values: Floats = vector.detach().numpy()
    lost: Floats | None = None if residual is None else residual.numpy()
    if isinstance(codec, TopKCodec):
        return _encode_largest(codec, values, lost)
    if isinstance(codec, NoCodec) and lost is None:
        return (frame_of(values),)
    packed = _DENSE[type(codec)].empty(len(values))
    in_blocks(len(values), lambda start, end: _pack(packed, values, lost, start, end))
    return packed.frames()


def decode(codec: Codec, size: int, frames: Sequence[Frame], out: Tensor | None = None) -> Tensor:
    """The vector in the frames, in `out` where that is given (which holds anything at all after an error)."""
    vector = torch.empty(size) if out is None else out
    values: Floats = vector.numpy()
    if isinstance(codec, TopKCodec):
        positions, found = _read_largest(codec, size, frames)
        values[:] = 0
        values[positions] = found
        return vector
    packed = _DENSE[type(codec)].read(size, frames)
    in_blocks(size, lambda start, end: _unpack(packed, values[start:end], start, end))
    return vector


def borrow(codec: Codec, size: int, frames: Sequence[Frame]) -> Tensor | None:
    """The vector in the frames where it lies, for reading only; None where it does not lie there as it is needed. Raises UpdateError."""
    if not isinstance(codec, NoCodec):
        return None
    values: Floats = Plain.read(size, frames).values
    if not (values.flags.writeable and values.flags.aligned and values.dtype.isnative):  # torch takes no other
        return None
    in_blocks(size, lambda start, end: _expect_finite(values[start:end]))
    return torch.from_numpy(values)


def decode_into(codec: Codec, size: int, frames: Sequence[Frame], target: Tensor, scale: float, own: bool = False) -> None:
    """`target += scale × decoded`. Everything is checked before anything is added, so an error leaves the target as it was.
    `own`: the frames were made here, so there is nothing to check."""
    values: Floats = target.numpy()
    if isinstance(codec, TopKCodec):
        positions, found = _read_largest(codec, size, frames)
        values[positions] += found * scale
        return
    packed = _DENSE[type(codec)].read(size, frames)
    if not own:
        in_blocks(size, lambda start, end: _unpack(packed, scratch(end - start), start, end))
    in_blocks(size, lambda start, end: _add(packed, values[start:end], scale, start, end))


def encoded_bytes(codec: Codec, size: int) -> int:
    """The most bytes an encoded vector takes."""
    if isinstance(codec, TopKCodec):
        kept = _kept(codec, size)
        return sparse.index_bytes(kept, size) + encoded_bytes(_KEPT[codec.values], kept)
    if isinstance(codec, Int8Codec):
        return size + 4 * chunks(size, Bytes.chunk)
    if isinstance(codec, Int4Codec):
        return -(-size // 2) + 4 * chunks(size, Nibbles.chunk)
    if isinstance(codec, TernaryCodec):
        return trits.packed_bytes(size) + 4 * chunks(size, trits.CHUNK)
    return size * (2 if isinstance(codec, Fp16Codec) else 4)


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
    return _KEPT[codec.values] if isinstance(codec, TopKCodec) else codec


def renew(weights: Tensor, kind: str, codec: Codec, frames: Sequence[Frame], own: bool = False) -> None:
    """Older weights become newer ones, in place, by what was published: `full` ones, `changes`, or a `difference`. `own`: as above."""
    if kind == "full":
        decode(NoCodec(), weights.numel(), frames, out=weights)
    elif kind == "changes":
        apply_changes(weights, frames)
    else:
        decode_into(of_weights(codec), weights.numel(), frames, weights, 1.0, own)


def _kept(codec: TopKCodec, size: int) -> int:
    return min(size, max(1, round(codec.ratio * size)))


def _encode_largest(codec: TopKCodec, values: Floats, lost: Floats | None) -> Frames:
    count = _kept(codec, len(values))
    if not len(values):
        return memoryview(b""), *encode(_KEPT[codec.values], torch.empty(0), None)
    if lost is None:
        positions, found = sparse.largest(values, count)
        return sparse.pack(positions, len(values)), *encode(_KEPT[codec.values], torch.from_numpy(found), None)
    if codec.error_decay < 1:
        lost *= np.float32(codec.error_decay)
    positions, found = sparse.largest(lost, count, values)
    rest = torch.zeros(count)
    frames = encode(_KEPT[codec.values], torch.from_numpy(found), rest)
    lost[positions] = rest.numpy()
    return sparse.pack(positions, len(values)), *frames


def _read_largest(codec: TopKCodec, size: int, frames: Sequence[Frame]) -> tuple[sparse.Positions, Floats]:
    count, kept = _kept(codec, size), _KEPT[codec.values]
    expect_frames(len(frames), 2 if isinstance(kept, NoCodec) else 3)
    values: Floats = decode(kept, count, frames[1:]).numpy()
    return sparse.unpack(frames[0], count, size), values


def _pack(packed: Dense, values: Floats, lost: Floats | None, start: int, end: int) -> None:
    if lost is None:
        return packed.pack(values[start:end], start, end)
    wanted = lost[start:end]
    wanted += values[start:end]
    packed.pack(wanted, start, end)
    sent = scratch(end - start)
    packed.unpack(start, end, sent)
    wanted -= sent


def _unpack(packed: Dense, out: Floats, start: int, end: int) -> None:
    packed.unpack(start, end, out)
    _expect_finite(out)


def _expect_finite(block: Floats) -> None:
    if not all_finite(block):
        raise UpdateError("values: a number that is not finite")


def _add(packed: Dense, target: Floats, scale: float, start: int, end: int) -> None:
    block = scratch(end - start)
    packed.unpack(start, end, block)
    block *= scale
    target += block
