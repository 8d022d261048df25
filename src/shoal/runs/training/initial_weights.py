"""The initial weights of a run that starts from another run's model (`rlhf.policy`), kept in its own folder."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor, nn

from shoal.config import Run
from shoal.engines.base import tensors_of
from shoal.errors import ShoalError
from shoal.manifest import check_manifest
from shoal.models.huggingface.as_gpt import weights_for
from shoal.runs.folder.checkpoint import load_weights, read_weights, save_weights
from shoal.runs.folder.run_reader import DATA
from shoal.runs.monitoring.best_weights import find_weights

FILE = "start.safetensors"
"""The reference model of the run, even if the other run changes or is deleted."""
_HEAD = "value_head."


def run_folder_of(policy: str) -> Path:
    """The folder of the run, given a run or one of its checkpoints."""
    folder = Path(policy)
    return folder.parent.parent if (folder / "state.json").exists() else folder


def passage_index_of(root: Path) -> Path | None:
    """The passage index of a run; an exported run has it in its folder. None where the run retrieves no passages."""
    if (root / "passages").is_dir():
        return root / "passages"
    known = (DATA.read(root / "data.json") or {}).get("passages")
    return Path(known) if known else None


def load_policy_weights(run: Run, players: dict[str, nn.Module], own_folder: Path | None) -> None:
    """Load the weights of `rlhf.policy`, if set, into the networks. A resumed run has them in its folder."""
    policy = run.rlhf.policy if run.rlhf is not None else None
    if policy is None:
        return
    kept = own_folder / FILE if own_folder is not None else None
    weights = _plain(load_weights(kept)) if kept is not None and kept.exists() else _weights_of(policy)
    for player in players.values():
        network = getattr(player, "trunk", player)
        _load(network, weights_for(network, weights), policy)


def _weights_of(policy: str) -> dict[str, Tensor]:
    """The weights of the other run, or of the model that it exported."""
    check_manifest(run_folder_of(policy))
    exported = Path(policy) / "model.safetensors"
    return _plain((read_weights(exported) if exported.exists() else find_weights(policy, lambda text: None)).weights_to_use)


def _plain(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """A model's weights by their names in the network; `trunk.` of a reward model is removed from names."""
    return {name.removeprefix("model.").removeprefix("trunk."): value for name, value in weights.items() if name.startswith("model.")}


def _load(network: nn.Module, plain: Mapping[str, Tensor], policy: str) -> None:
    """Load weights by name; heads are not loaded."""
    with torch.no_grad():
        for name, own in tensors_of(network):
            if name.startswith(_HEAD):
                continue
            if name not in plain or plain[name].shape != own.shape:
                settings = run_folder_of(policy) / "config.yaml"
                raise ShoalError(
                    f"rlhf.policy: the model at {policy} is another one: `{name}` does not fit; take the settings that it was trained with"
                    + (f" ({settings})" if settings.exists() else "")
                )
            own.copy_(plain[name])


def save_initial_weights(run: Run, folder: Path) -> None:
    """Save the initial weights of a policy in its run's folder, once: read anew, since an engine may have cut the network."""
    if run.rlhf is not None and run.rlhf.policy is not None and not (folder / FILE).exists():
        weights = _weights_of(run.rlhf.policy)
        save_weights(folder / FILE, {f"model.{name}": value for name, value in weights.items() if not name.startswith(_HEAD)})
