"""Does it learn? A GPT of 6 layers on tiny Shakespeare (characters), a DCGAN on 64 × 64 faces. Needs ../shared/data.

These have no peer: the figures are the quality reached and, for the GAN, signs of collapse. The grid is kept in results/.
"""

from __future__ import annotations

import json
import shutil
import tempfile
from pathlib import Path

from run import Row

from shoal.cli.main import main

ROOT = Path(__file__).parents[1]
DATA = ROOT.parent / "shared" / "data"

GPT = """\
dialect: shoal
model: {kind: gpt, hidden_size: 256, num_layers: 6, num_heads: 8, max_seq_len: 128, positions: rotary, feed_forward: swiglu,
        norm: rms, bias: false}
data: {source: {kind: text, path: PATH}, tokenizer: characters}
training:
  batch_size: 24
  max_steps: 900
  clipping: {max_norm: 1.0}
  optimizer: {name: AdamW, learning_rate: 0.002, beta2: 0.99, weight_decay: 0.1}
  schedule: {kind: cosine, warmup_steps: 60, end_learning_rate: 0.0001}
evaluation: {strategy: steps, every_steps: 300}
checkpoint: {strategy: never}
"""
GAN = """\
dialect: shoal
model: {kind: dcgan, image_size: 64, latent_dim: 100, generator_features: 48, discriminator_features: 16}
data: {source: {kind: images, path: PATH}}
training: {batch_size: 32, max_steps: 300, optimizer: {name: Adam, learning_rate: 0.0002, beta1: 0.5}}
evaluation: {strategy: steps, every_steps: 100}
checkpoint: {strategy: never}
logging: {every_steps: 50}
"""


def trained(text: str, data: Path, folder: Path) -> dict[str, dict[str, float]]:
    config = folder.with_suffix(".yaml")
    config.write_text(text.replace("PATH", str(data)))
    assert main(["train", str(config), "--run-dir", str(folder)]) == 0
    metrics: dict[str, dict[str, float]] = json.loads((folder / "summary.json").read_text())["metrics"]
    return metrics


def measure() -> list[Row]:
    results = ROOT / "results"
    results.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        gpt = trained(GPT, DATA / "text" / "tinyshakespeare.txt", folder / "gpt")
        gan = trained(GAN, DATA / "faces" / "congress_faces64.npz", folder / "gan")
        last = sorted((folder / "gan" / "samples").glob("*.png"))[-1]
        shutil.copy(last, results / "faces.png")
        spread = _spread(folder / "gan")
    loss, accuracy = gpt["eval"]["loss"], gan["train"]["discriminator_accuracy"]
    return [
        Row("Shakespeare GPT, validation loss", loss, 1.65, "nats/character", loss / 1.65, "≤ 1"),
        Row("faces DCGAN, discriminator accuracy", accuracy, 1.0, "share right", accuracy, "< 1", "1 would be a collapse"),
        Row(
            "faces DCGAN, spread of samples", spread, 0.03, "standard deviation", spread / 0.03, "≥ 1", "results/faces.png; real faces 0.16"
        ),
    ]


def _spread(run: Path) -> float:
    """How much the images of one grid differ from each other: near 0 for a generator that draws one picture."""
    from shoal.runs.trained_model import open_run

    images = open_run(str(run), lambda text: None).task.images()  # type: ignore[attr-defined]
    return float(images.std(0).mean())
