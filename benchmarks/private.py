"""What privacy costs: accuracy on MNIST at ε = 3 (δ = 1e-5), three workers, against the same run without noise.

The noise is what the accountant says ε = 3 takes for so many steps. Both ways to clip are shown: every sample's gradient by itself, and
whole contributions.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path

from run import Row

from shoal.updates.privacy import epsilon, sample_level_multiplier

MNIST = Path(__file__).resolve().parents[2] / "shared" / "data" / "mnist"
TARGET, DELTA = 3.0, 1e-5
WORKERS, BATCH, STEPS, SAMPLES = 3, 256, 240, 60_000
RATE = BATCH / (SAMPLES / WORKERS)


def noise_for(target: float, by_sample: bool) -> float:
    """The least multiplier with which so many steps stay within the target."""
    low, high = 0.1, 100.0
    for _ in range(40):
        middle = (low + high) / 2
        effective = middle if by_sample else sample_level_multiplier(middle)
        low, high = (middle, high) if epsilon(effective, RATE, STEPS, DELTA) > target else (low, middle)
    return high


def train(*settings: str) -> dict[str, float]:
    """The final metrics of a run with real processes, and the ε it reports."""
    with tempfile.TemporaryDirectory() as folder:
        common = [
            f"data.source.path={MNIST}",
            "data.source.kind=mnist",
            "model.kind=mlp",
            "model.hidden_sizes=[64]",
            "strategy.kind=syncps",
        ]
        common += [f"training.batch_size={BATCH}", f"training.max_steps={STEPS}", "training.optimizer.name=SGD", "logging.every_steps=10"]
        common += ["evaluation.strategy=steps", f"evaluation.every_steps={STEPS}", "strategy.round_timeout_s=120"]
        options = [word for setting in (*common, *settings) for word in ("--set", setting)]
        config = Path(folder) / "config.yaml"
        config.write_text("dialect: shoal\n")
        command = [sys.executable, "-m", "shoal", "train", str(config), "--workers", str(WORKERS), "--run-dir", f"{folder}/run", *options]
        result = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        if result.returncode:
            raise SystemExit(f"the run failed:\n{result.stdout}")
        summary = json.loads((Path(folder) / "run" / "summary.json").read_text())
        return summary["metrics"]["eval"] | {"epsilon": summary["metrics"]["train"].get("epsilon", 0.0)}


def measure() -> list[Row]:
    if not MNIST.is_dir():
        print("private: skipped, there is no MNIST in ../shared/data")
        return []
    clean = train("training.optimizer.learning_rate=0.5")
    rows = []
    for unit, rate in (("sample", 1.0), ("contribution", 0.02)):
        noise = noise_for(TARGET, unit == "sample")
        private = ("updates.privacy.enabled=true", f"updates.privacy.unit={unit}", f"updates.privacy.noise_multiplier={noise}")
        got = train(*private, "updates.clip_norm=1.0", f"training.optimizer.learning_rate={rate}")
        note = f"noise {noise:.2f}, the run reports ε = {got['epsilon']:.3f}"
        rows.append(
            Row(
                f"MNIST at ε = 3, clipped by {unit}",
                got["accuracy"],
                clean["accuracy"],
                "accuracy",
                got["accuracy"] / clean["accuracy"],
                "reported",
                note,
            )
        )
    return rows
