"""Wire format of sampled answers: the token ids of a unit, −1 after the end of each answer. Received frames are checked field by field.

Shapes: B answers, T tokens of the longest answer that is allowed.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from shoal.protocol.frames import Frame, UpdateError, expect_frames, frame_of, values_of


class InexactAnswers(UpdateError):
    """Answers that are well formed, but not what the draws select with the given weights."""


def pack(tokens_BT: Tensor) -> list[memoryview]:
    return [frame_of(tokens_BT.to(torch.int32).cpu().numpy())]


def unpack(frames: Sequence[Frame], rows: int, longest: int, vocabulary: int, eos_id: int | None) -> Tensor:
    """The tokens [B, T]. Holds: each answer has a token, and ends with `eos_id` or at the limit. Raises UpdateError otherwise."""
    expect_frames(len(frames), 1)
    tokens_BT = torch.from_numpy(values_of(frames[0], "<i4", rows * longest, "answers").astype(np.int64)).view(rows, longest)
    if int(tokens_BT.min()) < -1 or int(tokens_BT.max()) >= vocabulary:
        raise UpdateError(f"answers: a token id is not in the vocabulary of {vocabulary}")
    real_BT = tokens_BT >= 0
    if not real_BT[:, 0].all() or bool((real_BT[:, 1:] & ~real_BT[:, :-1]).any()):
        raise UpdateError("answers: one is empty, or goes on after its end")
    ends_BT = torch.zeros_like(real_BT) if eos_id is None else tokens_BT == eos_id
    if bool((ends_BT[:, :-1] & real_BT[:, 1:]).any()) or bool((~real_BT[:, -1] & ~ends_BT.any(1)).any()):
        raise UpdateError("answers: one ends without the token that ends answers, or goes on after it")
    return tokens_BT


def digest(frames: Sequence[Frame]) -> str:
    """Digest of the answers of a unit, for the ledger."""
    return hashlib.sha256(b"".join(bytes(frame) for frame in frames)).hexdigest()[:32]
