"""A run that goes on with the model of another: the weights that it begins with, kept in its own folder."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor, nn

from shoal.config import Run
from shoal.engines.base import tensors_of
from shoal.errors import ShoalError
from shoal.runs.folder.checkpoint import find_checkpoint, load_weights, read_weights, save_weights

FILE = "start.safetensors"
"""What a run began with: its reference, also when the other run has gone on, or is gone."""
_HEAD = "value_head."


def run_folder_of(policy: str) -> Path:
    """The folder of the run that a path means: a run, or one of its checkpoints."""
    folder = Path(policy)
    return folder.parent.parent if (folder / "state.json").exists() else folder


def passage_index_of(root: Path) -> Path | None:
    """The index that a run finds passages in: an exported one has it in its folder. None: it finds none."""
    if (root / "passages").is_dir():
        return root / "passages"
    try:
        known = json.loads((root / "data.json").read_text(encoding="utf-8")).get("passages")
    except (OSError, ValueError):
        return None
    return Path(known) if known else None


def load_policy_weights(run: Run, players: dict[str, nn.Module], own_folder: Path | None) -> None:
    """Give the networks the weights of `rlhf.policy`, where there is one. A run that goes on has kept them in its folder."""
    policy = run.rlhf.policy if run.rlhf is not None else None
    if policy is None:
        return
    kept = own_folder / FILE if own_folder is not None else None
    weights = load_weights(kept) if kept is not None and kept.exists() else _weights_of(policy)
    for player in players.values():
        _load(getattr(player, "trunk", player), weights, policy)


def _weights_of(policy: str) -> Mapping[str, Tensor]:
    exported = Path(policy) / "model.safetensors"
    return read_weights(exported).weights if exported.exists() else find_checkpoint(policy, lambda text: None).weights


def _load(network: nn.Module, weights: Mapping[str, Tensor], policy: str) -> None:
    """The trunk of a reward model is under another name in its own run; heads are not taken over."""
    plain = {name.removeprefix("model.").removeprefix("trunk."): value for name, value in weights.items() if name.startswith("model.")}
    with torch.no_grad():
        for name, own in tensors_of(network):
            if name.startswith(_HEAD):
                continue
            if name not in plain or plain[name].shape != own.shape:
                raise ShoalError(
                    f"rlhf.policy: the model at {policy} is another one: `{name}` does not fit; take the settings that it was trained with"
                )
            own.copy_(plain[name])


def save_initial_weights(run: Run, players: Mapping[str, nn.Module], folder: Path) -> None:
    """Keep what a policy began with in its run's folder, once."""
    if run.rlhf is not None and run.rlhf.policy is not None and not (folder / FILE).exists():
        save_weights(folder / FILE, initial_weights(players))


def initial_weights(players: Mapping[str, nn.Module]) -> dict[str, Tensor]:
    """What `load_policy_weights` gave the networks, to keep."""
    network = players["model"]
    return {f"model.{name}": value for name, value in tensors_of(getattr(network, "trunk", network)) if not name.startswith(_HEAD)}
