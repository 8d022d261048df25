"""The formats of GGUF files, number by number as llama.cpp's C code reads them."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from shoal.models.packed.formats import PackedShape, joined, unpacked
from shoal.models.packed.gguf_formats import FORMATS, floats, int4_rows


def half(block: bytes, at: int) -> float:
    return float(np.frombuffer(block[at : at + 2], np.float16)[0])


def q4_0(block: bytes) -> list[float]:
    return [half(block, 0) * (code - 8) for code in nibbles(block[2:])]


def q4_1(block: bytes) -> list[float]:
    return [half(block, 0) * code + half(block, 2) for code in nibbles(block[4:])]


def nibbles(packed: bytes) -> list[int]:
    return [one & 15 for one in packed] + [one >> 4 for one in packed]


def q5_0(block: bytes) -> list[float]:
    return [half(block, 0) * (code - 16) for code in five_bits(block, 2)]


def q5_1(block: bytes) -> list[float]:
    return [half(block, 0) * code + half(block, 2) for code in five_bits(block, 4)]


def five_bits(block: bytes, at: int) -> list[int]:
    word = int.from_bytes(block[at : at + 4], "little")
    return [code | (word >> i & 1) << 4 for i, code in enumerate(nibbles(block[at + 4 :]))]


def q8_0(block: bytes) -> list[float]:
    return [half(block, 0) * code for code in np.frombuffer(block[2:], np.int8).tolist()]


def q4_k(block: bytes) -> list[float]:
    found, small = [], block[4:16]
    for group in range(8):
        if group < 4:
            scale, offset = small[group] & 63, small[group + 4] & 63
        else:
            scale = small[group + 4] & 15 | small[group - 4] >> 6 << 4
            offset = small[group + 4] >> 4 | small[group] >> 6 << 4
        part = block[16 + group // 2 * 32 :][:32]
        codes = [one >> 4 if group % 2 else one & 15 for one in part]
        found += [half(block, 0) * scale * code - half(block, 2) * offset for code in codes]
    return found


def q6_k(block: bytes) -> list[float]:
    found, scales = [0.0] * 256, np.frombuffer(block[192:208], np.int8).tolist()
    for part in range(2):
        low, high = block[64 * part :][:64], block[128 + 32 * part :][:32]
        for i in range(32):
            bits = low[i] & 15, low[i + 32] & 15, low[i] >> 4, low[i + 32] >> 4
            for quarter, four in enumerate(bits):
                code = (four | (high[i] >> 2 * quarter & 3) << 4) - 32
                found[128 * part + 32 * quarter + i] = half(block, 208) * scales[8 * part + 2 * quarter + i // 16] * code
    return found


READ = {2: q4_0, 3: q4_1, 6: q5_0, 7: q5_1, 8: q8_0, 12: q4_k, 14: q6_k}
HALVES = {2: [0], 3: [0, 2], 6: [0], 7: [0, 2], 8: [0], 12: [0, 2], 14: [208]}


def random_rows(number: int) -> np.ndarray:
    """Three rows of 512 numbers: random bits, and scales that are numbers."""
    kind, chance = FORMATS[number], np.random.default_rng(number)
    blocks = chance.integers(0, 256, (3, 512 // kind.block, kind.nbytes), dtype=np.uint8)
    for at in HALVES[number]:
        blocks[..., at : at + 2] = chance.normal(size=blocks.shape[:2]).astype(np.float16)[..., None].view(np.uint8)
    return blocks


@pytest.mark.parametrize("number", READ, ids=lambda number: FORMATS[number].name)
def test_a_block_gives_the_numbers_that_llama_cpp_reads(number):
    blocks = random_rows(number)
    wanted = torch.tensor([[value for block in row for value in READ[number](block.tobytes())] for row in blocks])
    raw = torch.from_numpy(blocks.reshape(3, -1).copy())
    torch.testing.assert_close(floats(raw, FORMATS[number]), wanted, atol=1e-5, rtol=1e-6)
    if FORMATS[number].kind == "int4":
        (as_int4,) = unpacked(joined([int4_rows(raw, FORMATS[number])]), PackedShape("int4", 3, 512))
        # Scales and offsets are rounded to bf16, and codes are at most 8 steps from the offset
        assert ((as_int4 - wanted).abs() <= 2**-8 * wanted.abs().max()).all()


@pytest.mark.parametrize(("number", "dtype"), [(0, torch.float32), (1, torch.float16), (30, torch.bfloat16)])
def test_plain_numbers_are_read_as_they_are(number, dtype):
    weight = torch.randn(3, 5).to(dtype)
    assert torch.equal(floats(weight.view(torch.uint8), FORMATS[number]), weight.float())
