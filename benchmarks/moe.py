"""A mixture of experts against a dense model with as many active parameters, on equal tokens; routers and features side by side.

Each token visits two of eight experts, each half as wide as the dense feed-forward: the router's weights are all that a token uses beside.
"""

from __future__ import annotations

import contextlib
import io
import json
import tempfile
from pathlib import Path

from run import Row

from shoal.cli.main import main

TEXT = Path(__file__).parents[2] / "shared" / "data" / "text" / "tinyshakespeare.txt"
STEPS, ACTIVE_WIDTH, PER_TOKEN = 1500, 256, 2
"""With 300 steps each expert has seen a quarter of few tokens, and the two are alike."""
CONFIG = f"""\
dialect: shoal
model: {{kind: gpt, hidden_size: 64, num_layers: 3, num_heads: 4, max_seq_len: 64, intermediate_size: {ACTIVE_WIDTH}, dropout: 0.0,
        positions: rotary, feed_forward: swiglu, norm: rms, bias: false}}
data: {{source: {{kind: text, path: {TEXT}}}, tokenizer: characters}}
training:
  batch_size: 16
  max_steps: {STEPS}
  clipping: {{max_norm: 1.0}}
  optimizer: {{name: AdamW, learning_rate: 0.004, beta2: 0.99, weight_decay: 0.1}}
  schedule: {{kind: cosine, warmup_steps: 50, end_learning_rate: 0.0002}}
evaluation: {{strategy: steps, every_steps: {STEPS}, batches: 40}}
checkpoint: {{strategy: never}}
"""
MIXTURE = CONFIG.replace("kind: gpt", f"kind: moe, experts: {{count: 8, per_token: {PER_TOKEN}}}").replace(
    f"intermediate_size: {ACTIVE_WIDTH}", f"intermediate_size: {ACTIVE_WIDTH // PER_TOKEN}"
)
ROUTERS = ("gshard", "hash", "stochastic", "sigmoid-bias")
FEATURES = (
    ("no balance loss", ["model.experts.aux_loss_weight=0"]),
    ("z-loss", ["model.experts.z_loss_weight=0.001"]),
    ("nothing dropped", ["model.experts.capacity_factor=8"]),
    ("mixture of heads", ["model.mixture_of_heads.enabled=true"]),
    ("mixture of activations", ["model.mixture_of_activations.enabled=true"]),
    ("nvfp4, emulated", ["training.precision.kind=nvfp4", "training.allow_emulation=true"]),
    ("fp8, emulated", ["training.precision.kind=fp8", "training.allow_emulation=true"]),
    ("bf16", ["training.precision.kind=bf16"]),
)


def trained(config: str, settings: list[str]) -> dict[str, dict[str, float]] | None:
    """The last figures of a run; nothing where the settings ask for a part that is not built."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "config.yaml"
        path.write_text(config)
        chosen = [word for setting in settings for word in ("--set", setting)]
        with contextlib.redirect_stderr(io.StringIO()):
            if main(["config", "check", str(path), *chosen]):
                return None
        assert main(["train", str(path), "--run-dir", f"{folder}/run", *chosen]) == 0
        metrics: dict[str, dict[str, float]] = json.loads((Path(folder) / "run" / "summary.json").read_text())["metrics"]
    return metrics


def row(name: str, settings: list[str], peer: float, target: str) -> Row | None:
    metrics = trained(MIXTURE, settings)
    if metrics is None:
        print(f"moe, {name}: skipped, it is not built yet")
        return None
    loss, layers = metrics["eval"]["loss"], [value for name, value in metrics["train"].items() if name.endswith("/load_excess")]
    note = f"the fullest expert has {1 + sum(layers) / len(layers):.2f} × an even share"
    return Row(f"moe, {name}: validation loss", loss, peer, "nats/character", loss / peer, target, note)


def measure() -> list[Row]:
    if not TEXT.exists():
        print("moe: skipped, there is no text in ../shared/data")
        return []
    dense = trained(CONFIG, [])
    assert dense is not None
    first = row("switch, against a dense model of equal active parameters", [], dense["eval"]["loss"], "< 1")
    assert first is not None
    others = [row(f"{router}, against switch", [f"model.experts.router={router}"], first.ours, "–") for router in ROUTERS]
    others += [row(f"{name}, against without", settings, first.ours, "–") for name, settings in FEATURES]
    return [first, *(one for one in others if one is not None)]
