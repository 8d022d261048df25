"""torchft's side of goodput.py: DiLoCo between replicas that may die. It runs in an environment without Shoal.

`lighthouse` tells its address and waits. `replica` trains the same kind of GPT with the same rounds, one process to a replica, and tells in
lines of JSON when a round was committed: the time, the number of the round, and the samples in it. Heartbeats and time-outs are as short
as they may be without taking a busy replica for a dead one.
"""

from __future__ import annotations

import json
import logging
import sys
import time
from datetime import timedelta
from typing import Any

import torch
from small_gpt import Gpt
from torch import nn
from torch.distributed import TCPStore
from torchft.coordination import LighthouseServer
from torchft.local_sgd import DiLoCo
from torchft.manager import Manager
from torchft.process_group import ProcessGroupGloo

WAIT = timedelta(seconds=10)


def lighthouse(spec: dict[str, Any]) -> None:
    server = LighthouseServer(
        bind="[::]:0", min_replicas=spec["quorum"], join_timeout_ms=spec["grace_ms"], heartbeat_timeout_ms=spec["heartbeat_timeout_ms"]
    )
    _say(server.address())
    sys.stdin.read()
    server.shutdown()


def replica(spec: dict[str, Any]) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = Gpt(spec["width"], spec["layers"], spec["heads"], spec["length"])
    inner = torch.optim.AdamW(model.parameters(), lr=1e-3)
    outer = torch.optim.SGD(model.parameters(), lr=0.7, momentum=0.9, nesterov=True)
    store = TCPStore("localhost", 0, is_master=True, wait_for_workers=False)

    def load(state: dict[str, Any]) -> None:
        model.load_state_dict(state["model"])
        inner.load_state_dict(state["inner"])

    manager = Manager(
        pg=ProcessGroupGloo(timeout=WAIT),
        load_state_dict=load,
        state_dict=lambda: {"model": model.state_dict(), "inner": inner.state_dict()},
        min_replica_size=spec["quorum"],
        use_async_quorum=False,
        replica_id=spec["name"],
        store_addr="localhost",
        store_port=store.port,
        rank=0,
        world_size=1,
        lighthouse_addr=spec["lighthouse"],
        timeout=WAIT,
        quorum_timeout=timedelta(seconds=60),
        connect_timeout=WAIT,
    )
    torch.manual_seed(spec["seed"])
    round_, steps = 0, 0
    with DiLoCo(manager, [model], inner, outer, sync_every=spec["inner_steps"]):
        while True:
            tokens = torch.randint(256, (spec["batch"], spec["length"] + 1))
            logits = model(tokens[:, :-1])
            inner.zero_grad()
            nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten()).backward()
            inner.step()
            steps += 1
            if manager.current_step() != round_:
                round_ = manager.current_step()
                _say({"at": time.time(), "round": round_, "samples": spec["batch"] * steps, "replicas": manager.num_participants()})
                steps = 0


def _say(what: Any) -> None:
    print(json.dumps(what), flush=True)


if __name__ == "__main__":
    logging.disable(logging.INFO)
    {"lighthouse": lighthouse, "replica": replica}[sys.argv[1]](json.loads(sys.argv[2]))
