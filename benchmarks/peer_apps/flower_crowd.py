"""Flower's side of simulate.py: as many simulated clients, each of which sends back what it was sent. It runs in Flower's environment.

Nothing is learned: what a round costs is what Flower's simulation itself costs. `python -c "import flower_crowd; flower_crowd.main()"
CLIENTS NUMBERS SECONDS` prints a line of JSON after every
few hundred clients, and asks no more of them when the seconds are over.
"""

from __future__ import annotations

import itertools
import json
import os
import resource
import sys
import time

import numpy as np
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from flwr.simulation import run_simulation

_FIRST, _TOGETHER = 4, 200
"""Clients that are asked before the time counts; and clients that are asked at a time, so that a slow runtime tells something, too."""


def main() -> None:
    clients, numbers, seconds = int(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3])
    client_app, server_app, began = ClientApp(), ServerApp(), time.monotonic()

    @client_app.train()
    def train(message: Message, context: Context) -> Message:
        return Message(RecordDict({"arrays": message.content["arrays"], "metrics": MetricRecord({"num-examples": 1})}), reply_to=message)

    @server_app.main()
    def serve(grid: Grid, context: Context) -> None:
        while len(nodes := list(grid.get_node_ids())) < clients:
            time.sleep(0.1)
        content, done = RecordDict({"arrays": ArrayRecord([np.zeros(numbers, np.float32)])}), 0
        list(grid.send_and_receive([Message(content, node, "train") for node in nodes[:_FIRST]]))  # the runtime's processes start
        start = time.monotonic()
        for first in itertools.cycle(range(0, clients, _TOGETHER)):
            replies = list(grid.send_and_receive([Message(content, node, "train") for node in nodes[first : first + _TOGETHER]]))
            vectors = [reply.content["arrays"].to_numpy_ndarrays()[0] for reply in replies if reply.has_content()]
            content = RecordDict({"arrays": ArrayRecord([np.mean(vectors, axis=0)])})
            done += len(vectors)
            _tell(done, time.monotonic() - start, start - began)
            if time.monotonic() - start > seconds:
                os._exit(0)  # threads of the runtime may still wait

    run_simulation(server_app, client_app, num_supernodes=clients, backend_config={"client_resources": {"num_cpus": 1, "num_gpus": 0.0}})


def _tell(done: int, seconds: float, start_s: float) -> None:
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    print(json.dumps({"contributions": done, "seconds": seconds, "start_s": start_s, "server_gib": memory}), flush=True)
