"""Codecs on 25 million floats: encoding against copying the memory, the choice of the largest against `torch.topk`.

Each pair is interleaved, and the middle of the ratios counts; with error feedback, as is the default, and without. Chunks of top-k with
2-bit values are also decoded.

On a Neoverse-N1 (aarch64) int8 reaches about 0.15 of memcpy instead of 0.25. Memcpy takes 0.25 ns a number there. NumPy's passes over a
block that is in the cache take 0.13 (sign away), 0.19 (largest of a chunk), 0.29 (times its factor), 0.18 (round) and 0.13 (to bytes),
and a block of 131,072 numbers costs 50 µs of Python, 0.4 ns each; torch's kernels for the same passes are slower there (`aminmax` 2.0,
`quantize_per_channel` 7.2). One pass that does all of it needs code of its own for each processor, which Shoal has none of.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch
from run import Row
from torch import Tensor

from shoal.config.schema.updates import Codec, Fp16Codec, Int8Codec, TopKCodec
from shoal.updates.codecs import decode, encode, residual_for

SIZE, ROUNDS, SHARE = 25_000_000, 9, 0.01
Side = Callable[[], object]


def milliseconds(side: Side) -> float:
    start = time.perf_counter()
    side()
    return (time.perf_counter() - start) * 1000


def compare(name: str, ours: Side, peer: Side, target: str, note: str) -> Row:
    ours()
    peer()
    pairs = [(milliseconds(ours), milliseconds(peer)) for _ in range(ROUNDS)]
    left, right = (statistics.median(pair[i] for pair in pairs) for i in (0, 1))
    return Row(name, left, right, "ms", statistics.median(pair[1] / pair[0] for pair in pairs), target, note)


def about(codec: Codec, vector: Tensor) -> str:
    """Bytes saved; for what keeps only some numbers, how much of the squares it keeps, of what that many could hold."""
    frames = encode(codec, vector, None)
    note = f"{4 * SIZE / sum(frame.nbytes for frame in frames):.3g} times fewer bytes"
    if isinstance(codec, TopKCodec):
        kept, best = decode(codec, SIZE, frames).double().norm(), vector.abs().topk(round(SHARE * SIZE)).values.double().norm()
        note += f", {float((kept / best) ** 2):.4%} of the energy that so many can hold"
    return note


def measure() -> list[Row]:
    vector = torch.randn(SIZE, generator=torch.Generator().manual_seed(0))
    copy = torch.empty_like(vector)

    def memcpy() -> None:
        copy.copy_(vector)

    def topk() -> None:
        vector.abs().topk(round(SHARE * SIZE))

    rows = []
    for codec in (Fp16Codec(), Int8Codec(), TopKCodec(ratio=SHARE)):
        name, peer, target = ("torch.topk", topk, "≥ 3") if isinstance(codec, TopKCodec) else ("memcpy", memcpy, "≥ 0.25")
        note = about(codec, vector)
        for residual in (residual_for(codec, SIZE), None):

            def ours(codec: Codec = codec, residual: Tensor | None = residual) -> None:
                encode(codec, vector, residual)

            both = residual is not None
            wanted = "(for comparison: it moves the residual too)" if both and peer is memcpy else target
            rows.append(compare(f"{codec.kind}{' with error feedback' * both} to {name}", ours, peer, wanted, note))
    return rows + in_chunks(vector, copy)


def in_chunks(vector: Tensor, copy: Tensor) -> list[Row]:
    """The largest of every chunk, in both directions, with the residual."""
    codec = TopKCodec(ratio=0.03, chunk=4096, values="2-bit")
    residual, frames = residual_for(codec, SIZE), encode(codec, vector, None)
    note = f"{4 * SIZE / sum(frame.nbytes for frame in frames):.3g} times fewer bytes"

    def memcpy() -> None:
        copy.copy_(vector)

    return [
        compare("3 % in chunks with error feedback to memcpy", lambda: encode(codec, vector, residual), memcpy, "≥ 0.083", note),
        compare("3 % in chunks, decoded, to memcpy", lambda: decode(codec, SIZE, frames, copy), memcpy, "≥ 0.25", note),
    ]
