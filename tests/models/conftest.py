"""Small models and the sizes of made-up data, for the tests of this folder."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from shoal.config.data_shapes import DataShapes
from shoal.config.schema import model as schema
from shoal.models.gpt import Gpt

LM_FOLDER = Path(__file__).resolve().parents[2] / ".." / "shared" / "data" / "lm"


@pytest.fixture
def shapes() -> type[DataShapes]:
    return DataShapes


@pytest.fixture
def make_gpt() -> Callable[..., Gpt]:
    """A small GPT in evaluation mode, with weights large enough that its choices are not all alike."""

    def make(vocab_size: int = 31, **settings: object) -> Gpt:
        sizes = {"hidden_size": 24, "num_layers": 2, "num_heads": 4, "max_seq_len": 16}
        torch.manual_seed(0)
        model = Gpt(schema.Gpt(**sizes | settings), vocab_size)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(torch.randn_like(parameter) * 0.2)
        return model.eval()

    return make


@pytest.fixture
def lm_folder() -> Path:
    if not LM_FOLDER.is_dir():
        pytest.skip("needs the story models beside this checkout (../shared/data/lm)")
    return LM_FOLDER
