"""How long a user waits for `shoal config check`, against bare `python -c "import pydantic"`."""

from __future__ import annotations

import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from run import Row

ROUNDS = 25
SHOAL = [str(Path(sys.executable).with_name("shoal"))]


def long_config() -> str:
    """200 lines, each of which sets something: a WAN cluster with a long list of workers."""
    preset = Path(__file__).parents[1] / "src/shoal/config/presets/dist-llm-train/wan-aggressive.yaml"
    before, after = (line for line in preset.read_text().split("\nmodel:\n"))
    number = 0
    while len((before + after).splitlines()) < 200:
        number += 1
        before += f"  - name: extra-{number}\n    memory: 16\n    flops_per_second: 100\n    network_bandwidth: 50\n"
    return f"{before}\nmodel:\n{after}"


def seconds(command: list[str]) -> float:
    start = time.perf_counter()
    subprocess.run(command, check=True, capture_output=True)
    return time.perf_counter() - start


def measure() -> list[Row]:
    with tempfile.TemporaryDirectory() as folder:
        config = Path(folder) / "long.yaml"
        config.write_text(long_config())
        commands = {
            "check": [*SHOAL, "config", "check", str(config)],
            "help": [*SHOAL, "--help"],
            "pydantic": [sys.executable, "-c", "import pydantic"],
            "BaseModel": [sys.executable, "-c", "from pydantic import BaseModel"],
        }
        times: dict[str, list[float]] = {name: [] for name in commands}
        for _ in range(ROUNDS):
            for name, command in commands.items():
                times[name].append(seconds(command))
    middle = {name: statistics.median(values) * 1000 for name, values in times.items()}
    peer = middle["pydantic"]
    return [
        Row("config check, 200 lines", middle["check"], peer, "ms", middle["check"] / peer, "≤ 2"),
        Row("shoal --help", middle["help"], peer, "ms", middle["help"] / peer, "≤ 2"),
        Row("importing pydantic.BaseModel alone", middle["BaseModel"], peer, "ms", middle["BaseModel"] / peer, "(for comparison)"),
    ]
