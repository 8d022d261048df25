"""Samples a second of a run whose workers Ray started, against the same run started by `shoal train --workers`, in turn.

Ray is a cluster of two nodes on this machine, with a CPU each. Through it go strings only, so the two should be equally fast once they are
under way. `on-ray:3` measures three pairs instead of ten.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
from pathlib import Path

from processes import MLP, MNIST, QUIET, command, watch
from run import Row

SECONDS = 6.0


def measure(pairs: str = "10") -> list[Row]:
    from ray.cluster_utils import Cluster

    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
    cluster.add_node(num_cpus=1)
    source = MLP if MNIST.is_dir() else {}
    settings = {**QUIET, **source, "strategy.kind": "async", "transport.port": "0"}
    found: list[tuple[float, float]] = []
    try:
        with tempfile.TemporaryDirectory() as folder:
            for pair in range(int(pairs)):
                here = Path(folder) / f"here-{pair}"
                there = Path(folder) / f"ray-{pair}"
                alone = watch(here, command(here, settings, workers=2), seconds=SECONDS, threads=1).samples
                found.append((watch(there, _on_ray(there, settings, cluster.address), seconds=SECONDS, threads=1).samples, alone))
    finally:
        cluster.shutdown()
    ours, peer = (statistics.median(side) for side in zip(*found, strict=True))
    ratio = statistics.median(one / other for one, other in found)
    return [Row("workers on Ray, MLP", ours, peer, "samples/s", ratio, "≥ 0.95", f"median of {pairs} pairs")]


def _on_ray(run_dir: Path, settings: dict[str, str], address: str) -> list[str]:
    more = {**settings, "launch.kind": "ray", "launch.ray.address": address}
    made = [
        sys.executable,
        "-m",
        "shoal",
        "up",
        "starter",
        "--run-dir",
        str(run_dir),
        "--foreground",
        "--workers",
        "2",
        "--host",
        "127.0.0.1",
    ]
    return made + [part for path, value in more.items() for part in ("--set", f"{path}={value}")]
