"""Codecs: what comes out is what went in as far as the codec can, and no frame from a stranger does more than raise an UpdateError."""

from __future__ import annotations

import tracemalloc
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.config.schema.updates import Codec, Fp16Codec, Int4Codec, Int8Codec, NoCodec, TernaryCodec, TopKCodec
from shoal.updates.codecs import (
    UpdateError,
    apply_changes,
    borrow,
    decode,
    decode_into,
    dense,
    encode,
    encode_changes,
    encoded_bytes,
    residual_for,
    sparse_packing,
)
from shoal.updates.parallel_blocks import BLOCK

SPARSE = [
    TopKCodec(),
    TopKCodec(ratio=0.5),
    TopKCodec(ratio=0.0004),
    TopKCodec(values="int8"),
    TopKCodec(ratio=0.3, values="int4"),
    TopKCodec(ratio=0.1, values="ternary"),
]
CHUNKED = [
    TopKCodec(ratio=0.03, chunk=4096, values="2-bit"),
    TopKCodec(ratio=0.25, chunk=100, values="2-bit"),
    TopKCodec(ratio=0.0001, chunk=300),
    TopKCodec(ratio=1.0, chunk=64, values="int8"),
]
CODECS: list[Codec] = [NoCodec(), Fp16Codec(), Int8Codec(), Int4Codec(), TernaryCodec(), *SPARSE, *CHUNKED]
EACH: dict[str, Codec] = {"float32": NoCodec(), "int8": Int8Codec(), "int4": Int4Codec(), "ternary": TernaryCodec()}
LOSSY = [codec for codec in CODECS if not isinstance(codec, NoCodec)]
sizes = st.one_of(st.integers(1, 40), st.integers(1, 5000), st.sampled_from([BLOCK - 1, BLOCK, 2 * BLOCK + 1025]))


def vector(size: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(seed))


def size_of(frames: Sequence[bytes | memoryview]) -> int:
    return sum(memoryview(frame).nbytes for frame in frames)


def named(codec: Codec) -> str:
    return f"{codec.kind}{getattr(codec, 'ratio', '')}{getattr(codec, 'values', '')}{getattr(codec, 'chunk', '') or ''}"


def chunked_reference(codec: TopKCodec, values: torch.Tensor) -> torch.Tensor:
    """Chunk by chunk with sorting, and the two magnitudes in float64."""
    assert codec.chunk is not None
    chosen, sent, expected = [], [], torch.zeros(len(values))
    for start, part in zip(range(0, len(values), codec.chunk), values.split(codec.chunk), strict=True):
        count = min(len(part), max(1, round(codec.ratio * len(part))))
        indices = part.abs().sort(descending=True, stable=True).indices[:count].sort().values  # of equal ones the first
        found = part[indices]
        large = found.abs().double() > found.abs().double().mean()
        means = [found.abs()[which].double().mean().float().bfloat16().float() for which in (~large, large)]
        chosen.append(indices + start)
        sent.append(found.sign() * torch.where(large, *means[::-1]) if codec.values == "2-bit" else found)
    flat = torch.cat(sent)
    if codec.values in ("int8", "int4", "ternary"):
        flat = decode(EACH[codec.values], len(flat), encode(EACH[codec.values], flat, None))
    expected[torch.cat(chosen)] = flat
    return expected


@pytest.mark.parametrize("codec", CODECS, ids=named)
def test_the_bytes_of_a_vector_that_no_memory_holds_are_known(codec: Codec) -> None:
    whole, more = (encoded_bytes(codec, size) for size in (10**12, 10**12 + 4 * BLOCK))
    assert 0 < encoded_bytes(codec, 4 * BLOCK) / 4 / BLOCK < 4.2
    assert (more - whole) / 4 / BLOCK == pytest.approx(whole / 10**12, rel=0.01)


@settings(max_examples=60)
@given(st.sampled_from(CODECS), sizes, st.floats(-30, 30), st.integers(0, 9))
def test_a_vector_comes_back_as_near_as_the_codec_promises(codec: Codec, size: int, exponent: float, seed: int) -> None:
    values = vector(size, seed) * 10**exponent
    before = values.clone()
    frames = encode(codec, values, None)
    back = decode(codec, size, [bytes(frame) for frame in frames])
    assert torch.equal(values, before)
    assert size_of(frames) <= encoded_bytes(codec, size)
    if isinstance(codec, NoCodec):
        assert torch.equal(back, values)
    elif isinstance(codec, Fp16Codec):
        assert torch.equal(back, values.clamp(-65504, 65504).half().float())
    elif isinstance(codec, Int8Codec | Int4Codec):
        chunk, levels = (1024, 127) if isinstance(codec, Int8Codec) else (256, 7)
        peaks = torch.stack([part.abs().max() for part in values.split(chunk)])
        steps = (peaks / levels).repeat_interleave(chunk)[:size]
        assert ((back - values).abs() <= 0.501 * steps).all()
    elif isinstance(codec, TernaryCodec):
        for sent, came in zip(values.double().split(1024), back.double().split(1024), strict=True):
            scale = 1.22 * float(sent.square().mean().sqrt())
            expected = torch.where(sent.abs() > 0.5 * scale, sent.sign() * scale, 0.0)
            clear = (sent.abs() - 0.5 * scale).abs() > 1e-5 * scale  # rounding decides about the others
            assert torch.allclose(came[clear], expected[clear], rtol=1e-5, atol=0)
    elif isinstance(codec, TopKCodec) and codec.chunk:
        assert torch.equal(back, chunked_reference(codec, values))
    else:
        kept = max(1, round(codec.ratio * size))
        expected = torch.zeros(size)
        largest = values.abs().sort(descending=True, stable=True).indices[:kept].sort().values  # of equal ones the first
        expected[largest] = decode(EACH[codec.values], kept, encode(EACH[codec.values], values[largest], None))
        assert torch.equal(back, expected)


@pytest.mark.parametrize("codec", CODECS, ids=named)
def test_out_is_filled_and_differences_are_added(codec: Codec) -> None:
    values = vector(5000)
    frames = encode(codec, values, None)
    plain = decode(codec, 5000, frames)
    out = torch.full((5000,), torch.nan)
    assert decode(codec, 5000, frames, out) is out
    assert torch.equal(out, plain)
    target = vector(5000, 1)
    expected = target + 0.25 * plain
    decode_into(codec, 5000, frames, target, 0.25)
    assert torch.allclose(target, expected, atol=1e-6)


@pytest.mark.parametrize("codec", LOSSY, ids=named)
def test_with_error_feedback_the_sum_that_arrives_follows_the_sum_that_was_sent(codec: Codec) -> None:
    size, steps = 3000, 60
    residual = residual_for(codec, size)
    assert residual is not None
    sent, arrived = torch.zeros(size, dtype=torch.float64), torch.zeros(size, dtype=torch.float64)
    for step in range(steps):
        update = vector(size, step) + 1
        sent += update
        arrived += decode(codec, size, encode(codec, update, residual))
    assert torch.allclose(sent, arrived + residual, atol=1e-3)
    assert float((sent - arrived).norm()) == pytest.approx(float(residual.norm()), rel=1e-3, abs=1e-3)


def test_error_feedback_is_what_lets_a_constant_update_through() -> None:
    """A quarter of each step is lost without it, always the same quarter."""
    codec = TopKCodec(ratio=0.25)
    update = torch.tensor([1.0, 0.9, 0.8, 0.7])
    residual = residual_for(codec, 4)
    total = sum(decode(codec, 4, encode(codec, update, residual)) for _ in range(400)) / 400
    assert torch.allclose(total, update, atol=0.02)


def test_what_no_update_confirms_fades() -> None:
    codec = TopKCodec(ratio=0.25, error_decay=0.5)
    residual = residual_for(codec, 4)
    assert residual is not None
    encode(codec, torch.tensor([1.0, 0.8, 0.4, 0.2]), residual)
    assert torch.allclose(residual, torch.tensor([0.0, 0.8, 0.4, 0.2]))
    sent = decode(codec, 4, encode(codec, torch.tensor([0.0, 0.0, 0.4, 0.0]), residual))
    assert torch.allclose(sent, torch.tensor([0.0, 0.0, 0.6, 0.0]))
    assert torch.allclose(residual, torch.tensor([0.0, 0.4, 0.0, 0.1]))


def test_residuals_are_for_what_loses_something() -> None:
    assert residual_for(NoCodec(), 5) is None
    assert residual_for(TopKCodec(error_feedback=False), 5) is None
    for codec in LOSSY:
        residual = residual_for(codec, 5)
        assert residual is not None
        assert torch.equal(residual, torch.zeros(5))


def test_a_residual_without_a_codec_is_sent_whole() -> None:
    residual = torch.ones(7)
    assert torch.equal(decode(NoCodec(), 7, encode(NoCodec(), torch.ones(7), residual)), torch.full((7,), 2.0))
    assert not residual.any()


def test_no_codec_copies_nothing() -> None:
    values = vector(10)
    (frame,) = encode(NoCodec(), values, None)
    values[3] = 42.0
    assert np.frombuffer(frame, np.float32)[3] == 42.0


def test_half_precision_is_the_same_bits_on_every_processor(monkeypatch: pytest.MonkeyPatch) -> None:
    """NumPy converts on ARM and torch elsewhere: also what is rounded, too small for 16 bits, or too large."""
    bits = torch.randint(-(2**31), 2**31 - 1, (200_000,), generator=torch.Generator().manual_seed(0), dtype=torch.int32)
    vector = bits.view(torch.float32).nan_to_num(0.0, 0.0, 0.0)
    frames = []
    for numpy_converts in (True, False):
        monkeypatch.setattr(dense, "_NUMPY_CONVERTS_FASTER", numpy_converts)
        encoded = encode(Fp16Codec(), vector, None)
        frames.append((bytes(encoded[0]), decode(Fp16Codec(), len(vector), encoded).numpy().tobytes()))
    assert frames[0] == frames[1]


@pytest.mark.parametrize(
    ("codec", "times"),
    [
        (Fp16Codec(), 2.0),
        (Int8Codec(), 3.9),
        (Int4Codec(), 7.7),
        (TernaryCodec(), 19.0),
        (TopKCodec(ratio=0.01), 60.0),
        (CHUNKED[0], 113.0),
    ],
)
def test_the_bytes_sent_are_the_bytes_claimed(codec: Codec, times: float) -> None:
    size = 1_000_000
    frames = encode(codec, vector(size), None)
    assert 4 * size / size_of(frames) >= times
    assert 4 * size / encoded_bytes(codec, size) >= 0.9 * times


def test_sixteen_bits_saturate() -> None:
    values = torch.tensor([1e9, -1e9, 65504.0, 65520.0])
    assert decode(Fp16Codec(), 4, encode(Fp16Codec(), values, None)).tolist() == [65504.0, -65504.0, 65504.0, 65504.0]


@pytest.mark.parametrize("codec", CODECS, ids=named)
def test_the_ends_of_the_range_travel(codec: Codec) -> None:
    largest, smallest = torch.finfo(torch.float32).max, 1e-45
    for value in (largest, -largest, smallest, 0.0):
        values = torch.full((1500,), value)
        back = decode(codec, 1500, encode(codec, values, residual_for(codec, 1500)))
        assert back.isfinite().all()


@pytest.mark.parametrize("codec", CODECS, ids=named)
def test_an_empty_vector_travels(codec: Codec) -> None:
    assert decode(codec, 0, encode(codec, torch.empty(0), None)).shape == (0,)


@settings(max_examples=30)
@given(st.integers(1, 3000), st.integers(0, 5), st.floats(0.001, 1), st.integers(0, 99))
def test_top_k_is_exact_with_ties_and_zeros(size: int, levels: int, ratio: float, seed: int) -> None:
    values = torch.randint(-levels, levels + 1, (size,), generator=torch.Generator().manual_seed(seed)).float()
    count = max(1, round(ratio * size))
    frames = encode(TopKCodec(ratio=ratio), values, None)
    assert memoryview(frames[1]).nbytes == 4 * count
    found = np.sort(np.abs(np.frombuffer(frames[1], np.float32)))
    assert np.array_equal(found, np.sort(np.abs(values.numpy()))[size - count :])
    decode(TopKCodec(ratio=ratio), size, frames)


@pytest.mark.parametrize("shape", ["spikes", "zeros", "constant", "blocks", "normal"])
def test_top_k_of_a_long_vector_is_the_true_one_whatever_the_sample_says(shape: str) -> None:
    size, count = 400_000, 4000
    values = {
        "spikes": lambda: torch.zeros(size).index_fill_(0, torch.arange(3000, 3500), 5.0),
        "zeros": lambda: torch.zeros(size),
        "constant": lambda: torch.full((size,), -3.0),
        "blocks": lambda: vector(size) * (torch.arange(size) >= size - 4100),
        "normal": lambda: vector(size),
    }[shape]()
    positions, found = sparse_packing.largest(values.numpy(), count)
    expected = values.abs().topk(count).values
    assert len(positions) == count
    assert (np.diff(positions) > 0).all()
    assert np.array_equal(np.sort(np.abs(found)), np.sort(expected.numpy()))
    assert np.array_equal(values.numpy()[positions], found)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("codec", [NoCodec(), Int8Codec(), Int4Codec(), TernaryCodec(), TopKCodec(), *CHUNKED], ids=named)
def test_a_number_that_is_not_finite_is_refused_on_arrival(codec: Codec, bad: float) -> None:
    values = vector(3000)
    values[1234] = bad
    frames = encode(codec, values, None)
    target = torch.zeros(3000)
    with pytest.raises(UpdateError):
        decode(codec, 3000, frames)
    with pytest.raises(UpdateError):
        decode_into(codec, 3000, frames, target, 1.0)
    assert not target.any()


@pytest.mark.parametrize("bits", [0x7C00, 0xFC00, 0x7E01])
def test_sixteen_bits_that_are_not_finite_are_refused(bits: int) -> None:
    payload = np.zeros(300_000, np.uint16)
    payload[-1] = bits
    with pytest.raises(UpdateError, match="not finite"):
        decode(Fp16Codec(), 300_000, [payload.tobytes()])


@pytest.mark.parametrize("scale", [np.nan, np.inf, -1.0, 3e38])
def test_a_scale_that_is_none_is_refused(scale: float) -> None:
    scales = np.array([1.0, scale], np.float32)
    with pytest.raises(UpdateError, match="scale"):
        decode(Int8Codec(), 1500, [scales.tobytes(), bytes(1500)])
    with pytest.raises(UpdateError, match="scale"):
        decode(Int4Codec(), 500, [scales.tobytes(), bytes(250)])
    with pytest.raises(UpdateError, match="scale"):
        decode(TernaryCodec(), 1500, [scales.tobytes(), bytes(205 + 96)])


def hostile(data: st.DataObject, frames: list[bytes]) -> list[bytes]:
    """Frames cut, lengthened, overwritten, exchanged, left out or made up."""
    which = data.draw(st.integers(0, len(frames) - 1))
    frame = frames[which]
    match data.draw(st.sampled_from(["cut", "longer", "overwritten", "exchanged", "missing", "more", "random"])):
        case "cut":
            frames[which] = frame[: data.draw(st.integers(0, max(0, len(frame) - 1)))]
        case "longer":
            frames[which] = frame + data.draw(st.binary(min_size=1, max_size=20))
        case "overwritten":
            place = data.draw(st.integers(0, len(frame)))
            piece = data.draw(st.sampled_from([b"\xff" * 8, b"\x00" * 8, b"\x7f\xc0\x7f\x80", b"\xff\xff\xff\x7f"]))
            frames[which] = (frame[:place] + piece + frame[place + len(piece) :])[: len(frame)]
        case "exchanged":
            frames.reverse()
        case "missing":
            frames.pop(which)
        case "more":
            frames.append(frame)
        case _:
            frames[which] = data.draw(st.binary(max_size=300))
    return frames


@settings(max_examples=300)
@given(st.data(), st.sampled_from(CODECS), st.integers(1, 3000))
def test_hostile_frames_raise_an_update_error_or_decode_to_finite_numbers(data: st.DataObject, codec: Codec, size: int) -> None:
    frames = hostile(data, [bytes(frame) for frame in encode(codec, vector(size), None)])
    target = torch.zeros(size)
    try:
        back = decode(codec, size, frames)
    except UpdateError:
        with pytest.raises(UpdateError):
            decode_into(codec, size, frames, target, 1.0)
        assert not target.any()
    else:
        assert back.shape == (size,)
        assert back.isfinite().all()


@settings(max_examples=200)
@given(st.data(), st.integers(1, 3000), st.integers(0, 50))
def test_hostile_changes_raise_an_update_error_and_change_nothing(data: st.DataObject, size: int, changed: int) -> None:
    old = vector(size)
    new = old.clone()
    new[:: max(1, size // (changed + 1))] += 1
    frames = encode_changes(old, new)
    broken = hostile(data, [bytes(frame) for frame in frames or encode(NoCodec(), new, None)])
    target = old.clone()
    try:
        apply_changes(target, broken)
    except UpdateError:
        assert torch.equal(target, old)
    else:
        assert target.isfinite().all()


@settings(max_examples=100)
@given(st.integers(1, 100_000), st.data())
def test_positions_come_back(size: int, data: st.DataObject) -> None:
    chosen = data.draw(st.sets(st.integers(0, size - 1), min_size=1, max_size=min(size, 200)))
    positions = np.array(sorted(chosen), np.int64)
    frame = sparse_packing.pack(positions, size)
    assert frame.nbytes <= sparse_packing.index_bytes(len(positions), size)
    assert np.array_equal(sparse_packing.unpack(frame, len(positions), size), positions)


def test_positions_outside_the_vector_are_refused() -> None:
    frame = sparse_packing.pack(np.array([5, 900], np.int64), 1000)
    with pytest.raises(UpdateError, match="outside"):
        sparse_packing.unpack(frame, 2, 800)
    with pytest.raises(UpdateError, match="positions"):
        sparse_packing.unpack(b"\xff\xff", 2, 1000)


@settings(max_examples=40)
@given(st.integers(1, 5000), st.floats(0, 1), st.integers(0, 99))
def test_changes_are_exact_to_the_bit_and_smaller_than_the_whole(size: int, share: float, seed: int) -> None:
    old = vector(size, seed)
    new = torch.where(torch.rand(size, generator=torch.Generator().manual_seed(seed)) < share, -old, old)
    old[0], new[0] = 0.0, -0.0
    frames = encode_changes(old, new)
    if frames is None:
        assert int((old.view(torch.int32) != new.view(torch.int32)).sum()) * 5 >= 4 * size * 0.9 or size < 10
        return
    assert size_of(frames) < 4 * size
    apply_changes(old, frames)
    assert torch.equal(old.view(torch.int32), new.view(torch.int32))


def test_everything_new_is_no_difference_worth_sending() -> None:
    old = vector(500_000)
    assert encode_changes(old, old + 1) is None
    assert encode_changes(old, old) == (b"", b"")


def test_more_values_than_the_vector_has_are_refused_before_they_are_read() -> None:
    with pytest.raises(UpdateError, match="values"):
        apply_changes(torch.zeros(10), [b"\0" * 1000, b"\0" * 4000])


@pytest.mark.parametrize("codec", CODECS, ids=named)
def test_a_frame_that_is_far_too_long_costs_no_memory(codec: Codec) -> None:
    frames = [bytes(1 << 20)] * len(encode(codec, vector(100), None))
    tracemalloc.start()
    with pytest.raises(UpdateError):
        decode(codec, 100, frames)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 100_000


def test_long_vectors_take_the_same_way_in_all_threads() -> None:
    """More blocks than threads, a size that divides by nothing."""
    size = 5 * BLOCK + 777
    values = vector(size)
    for codec in CODECS:
        whole = decode(codec, size, encode(codec, values, None))
        if not isinstance(codec, TopKCodec):
            parts = [decode(codec, len(part), encode(codec, part, None)) for part in values.split(BLOCK)]
            assert torch.equal(whole, torch.cat(parts))


def test_numbers_that_lie_in_a_frame_are_borrowed_and_checked() -> None:
    values = np.arange(5, dtype="<f4")
    found = borrow(NoCodec(), 5, [memoryview(values).cast("B")])
    assert found is not None
    assert found.tolist() == [0, 1, 2, 3, 4]
    values[2] = 7
    assert found[2] == 7, "no copy"
    assert borrow(NoCodec(), 5, [values.tobytes()]) is None, "what may not be written to is no tensor"
    assert borrow(NoCodec(), 5, [memoryview(bytearray(22))[1:21]]) is None, "nor is what lies askew"
    assert borrow(Fp16Codec(), 5, [memoryview(bytearray(10))]) is None
    values[2] = np.nan
    with pytest.raises(UpdateError, match="finite"):
        borrow(NoCodec(), 5, [memoryview(values).cast("B")])
    with pytest.raises(UpdateError, match="needed"):
        borrow(NoCodec(), 6, [memoryview(values).cast("B")])
