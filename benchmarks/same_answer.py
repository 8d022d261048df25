"""The same answer: what three workers learn under each strategy, against one process that learned from the same samples. Real processes.

MNIST with the documented MLP (accuracy; at most half a point less), and the documented GPT made small, with its own optimizer and schedule,
on text (loss; at most 2 % more). `syncps` is compared
with one process that takes the three batches at once. `edp` is shown with a pull at every step and with the documented interval of 10, at
which it falls behind: what lags by 20 versions counts for a twenty-first.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path

from run import Row

DATA = Path(__file__).resolve().parents[2] / "shared" / "data"
WORKERS = 3
MNIST = [f"data.source.path={DATA / 'mnist'}", "logging.track_gradients=false", "logging.sinks=[]", "training.schedule.kind=cosine"]
GPT = [f"data.source.path={DATA / 'text' / 'tinyshakespeare.txt'}", "data.source.kind=text", "data.tokenizer=characters"]
GPT += ["model.hidden_size=64", "model.intermediate_size=256", "model.num_layers=2", "model.dropout=0.0", "model.max_seq_len=32"]
GPT += ["data.sequence_length=32", "training.epochs=2", "evaluation.batches=200", "logging.sinks=[]"]
STRATEGIES = {
    "syncps": ["strategy.kind=syncps", "strategy.round_timeout_s=60"],
    "edp, every step": ["strategy.kind=edp", "strategy.pull_every_steps=1", "strategy.look_ahead=true"],
    "edp, every 10": ["strategy.kind=edp", "strategy.pull_every_steps=10"],
    "async": ["strategy.kind=async"],
}


def train(files: list[str], settings: list[str], workers: int = 1) -> dict[str, float]:
    """The final judgement of a run, and how many samples it took."""
    with tempfile.TemporaryDirectory() as folder:
        options = [word for setting in settings for word in ("--set", setting)]
        config = Path(folder) / "config.yaml"
        config.write_text("dialect: shoal\ncheckpoint: {strategy: never}\nevaluation: {strategy: epoch}\n")
        command = [sys.executable, "-m", "shoal", "train", *files, str(config), "--run-dir", f"{folder}/run", *options]
        command += ["--workers", str(workers)] if workers > 1 else []
        result = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        if result.returncode:
            raise SystemExit(f"the run failed:\n{result.stdout}")
        summary = json.loads((Path(folder) / "run" / "summary.json").read_text())
    print(f"  {summary['samples']} samples, {summary['wall_s']:.0f} s, {summary['metrics']['eval']}", file=sys.stderr, flush=True)
    return {**summary["metrics"]["eval"], "samples": summary["samples"]}


def measure() -> list[Row]:
    if not DATA.is_dir():
        print("same-answer: skipped, there is no ../shared/data")
        return []
    rows = []
    for name, files, common, batch, figure in (("MNIST", ["nn_config"], MNIST, 32, "accuracy"), ("GPT", ["gpt_config"], GPT, 16, "loss")):
        alone = {size: train(files, [*common, f"training.batch_size={size}"]) for size in (batch, WORKERS * batch)}
        for strategy, settings in STRATEGIES.items():
            peer = alone[WORKERS * batch if strategy == "syncps" else batch][figure]
            ours = train(files, [*common, *settings, f"training.batch_size={batch}"], WORKERS)[figure]
            if figure == "accuracy":
                rows.append(Row(f"{name}, {strategy}: accuracy", ours, peer, "points less", 100 * (peer - ours), "≤ 0.5"))
            else:
                rows.append(Row(f"{name}, {strategy}: loss", ours, peer, "nats/character", ours / peer, "≤ 1.02"))
    return rows
