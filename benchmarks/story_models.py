"""The story models of shared/data/lm (llama2.c's format, as arrays) as a Gpt."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch

from shoal.config.schema import model as schema
from shoal.models.gpt import Gpt


def load_story_model(folder: Path, name: str) -> tuple[Gpt, dict[str, Any]]:
    """The model in evaluation mode, and its config with the reference outputs."""
    config = json.loads((folder / f"{name}.config.json").read_text())
    settings = schema.Gpt(
        hidden_size=config["dim"],
        num_layers=config["n_layers"],
        num_heads=config["n_heads"],
        num_kv_heads=config["n_kv_heads"],
        intermediate_size=config["hidden_dim"],
        max_seq_len=config["max_seq_len"],
        norm_eps=config["norm_eps"],
        positions="rotary",
        feed_forward="swiglu",
        norm="rms",
        bias=False,
    )
    model = Gpt(settings, config["vocab_size"])
    with np.load(folder / f"{name}.npz") as arrays:
        model.load_state_dict(gpt_weights({key: torch.from_numpy(array.astype(np.float32)) for key, array in arrays.items()}))
    return model.eval(), config


def gpt_weights(arrays: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    weights = {"token_embedding.weight": arrays["tok_embeddings"], "norm.weight": arrays["norm"]}
    for i in range(len(arrays["wq"])):
        parts = {
            "attention_norm": ("attention_norm",),
            "attention.query_key_value": ("wq", "wk", "wv"),
            "attention.output": ("wo",),
            "feed_forward_norm": ("ffn_norm",),
            "feed_forward.up": ("w1", "w3"),
            "feed_forward.down": ("w2",),
        }
        for ours, theirs in parts.items():
            weights[f"blocks.{i}.{ours}.weight"] = torch.cat([arrays[key][i] for key in theirs])
    return weights
