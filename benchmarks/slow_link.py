"""DiLoCo over slow links: a GPT of 10M parameters, two workers behind 10, 50 and 100 Mbit/s, and how much of their time they compute.

Fragments take turns (Streaming DiLoCo), each is sent while the worker goes on, and differences are 8-bit in both directions. A worker
itself counts the time that it waits for answers, from its first step to its last. The peers are plain DiLoCo (all weights at once, in
float32, and everybody waits for them) and hivemind's Optimizer with a model of the same size, whose two peers have one such link between
them (`peer_apps/hivemind_app.py` tells how it is set up).
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

import peers
from processes import Helper
from run import Row

from shoal.transports.netem import NetemProxy, profile

RATES = (10, 50, 100)
WIDTH, LAYERS, HEADS, LENGTH, BATCH, STEPS, ROUND = 320, 8, 5, 64, 4, 96, 32
CONFIG = f"""\
dialect: shoal
model: {{kind: gpt, hidden_size: {WIDTH}, num_layers: {LAYERS}, num_heads: {HEADS}, max_seq_len: {LENGTH}, dropout: 0.0}}
data: {{source: {{kind: builtin, name: python-source}}, tokenizer: bytes, sequence_length: {LENGTH}}}
training: {{batch_size: {BATCH}, max_steps: {STEPS}, device: cpu, optimizer: {{name: AdamW, learning_rate: 0.001}}}}
strategy: {{kind: diloco, inner_steps: {ROUND}}}
evaluation: {{strategy: never}}
checkpoint: {{strategy: never}}
"""
PATIENCE_S = 300.0
"""For hivemind's three rounds: at 10 Mbit/s they would take more than a quarter of an hour."""
TRIES = 2
"""Now and then its peers miss each other at the start, and wait."""
STREAMING = ["strategy.fragments=4", "strategy.overlap_steps=6", "updates.codec.kind=int8"]


def busy(rate: int, settings: list[str]) -> float:
    """The smaller of the two workers' shares."""
    with tempfile.TemporaryDirectory() as folder:
        config = Path(folder) / "config.yaml"
        config.write_text(CONFIG)
        chosen = [word for setting in settings for word in ("--set", setting)]
        command = [sys.executable, "-m", "shoal", "train", str(config), "--workers", "2", "--netem", f"{rate}mbit"]
        result = subprocess.run(
            [*command, "--run-dir", f"{folder}/run", *chosen], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        if result.returncode:
            raise SystemExit(f"the run failed:\n{result.stdout}")
        said = [path.read_text() for path in (Path(folder) / "run" / "workers").glob("*.log")]
    return min(int(re.findall(r"computing (\d+)% of the time", log)[-1]) for log in said) / 100


def hivemind_busy(rate: int) -> float:
    """The same of hivemind's two peers; they may begin once more where they did not get to the end in time, and then it is 0."""
    return next((share for share in (hivemind_once(rate) for _ in range(TRIES)) if share), 0.0)


def hivemind_once(rate: int) -> float:
    """Two peers, the second of which reaches the first through the proxy; 0 where they are not done in time."""
    spec = {"width": WIDTH, "layers": LAYERS, "heads": HEADS, "length": LENGTH, "batch": BATCH, "steps": STEPS, "steps_per_round": ROUND}
    app, python = Path(__file__).with_name("peer_apps") / "hivemind_app.py", peers.python("hivemind")
    first = Helper(app, "first", python=python, **spec)
    helpers, weather, expired = [first], None, threading.Event()

    def give_up() -> None:
        expired.set()
        for helper in helpers:
            helper.close()

    late = threading.Timer(PATIENCE_S, give_up)
    try:
        _, _, host, _, port, _, identity = first.hear().split("/")
        weather = NetemProxy(f"tcp://{host}:{port}", profile(f"{rate}mbit"))
        helpers.append(Helper(app, "second", python=python, **spec))
        helpers[1].say(f"/ip4/127.0.0.1/tcp/{weather.address.rpartition(':')[2]}/p2p/{identity}")
        late.start()
        told = [helper.hear() for helper in helpers]
    except RuntimeError:
        if not expired.is_set():
            raise
        print(f"  hivemind at {rate} Mbit/s: not done after {PATIENCE_S:.0f} s", file=sys.stderr, flush=True)
        return 0.0
    finally:
        late.cancel()
        for helper in helpers:
            helper.close()
        if weather is not None:
            weather.close()
    print(f"  hivemind at {rate} Mbit/s: {told}", file=sys.stderr, flush=True)
    return float(min(one["busy"] for one in told))


def measure() -> list[Row]:
    rows = []
    for rate in RATES:
        ours = busy(rate, STREAMING)
        target = "≥ 0.95" if rate == 50 else ""
        for name, of_peer in (("plain DiLoCo", lambda rate: busy(rate, [])), ("hivemind", hivemind_busy)):
            row = Row(f"slow-link, {rate} Mbit/s: computing, against {name}", ours, of_peer(rate), "of the time", ours, target)
            print(row, file=sys.stderr, flush=True)
            rows.append(row)
    return rows
