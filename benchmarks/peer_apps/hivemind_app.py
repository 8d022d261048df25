"""hivemind's side of slow_link.py: two peers that train a GPT of 10M parameters and average it. It runs in an environment without Shoal.

Each steps on its own (`use_local_updates`) and averages its weights with the other's, in half precision and beside the computing
(`delay_state_averaging`), when the two have taken as many samples as two workers of Shoal have in a round. That is the least waiting that
hivemind's Optimizer has to offer: averaging gradients instead, it must wait for them before every step of its optimizer.

In lines of JSON: the first peer tells its address, the second is told it; both tell what became of so many steps since they saw each other,
and go on until they are ended.
"""

from __future__ import annotations

import json
import sys
import time
from typing import Any

import hivemind
import torch
from hivemind.compression import Float16Compression
from small_gpt import Gpt
from torch import nn


def main() -> None:
    role, spec = sys.argv[1], json.loads(sys.argv[2])
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = Gpt(spec["width"], spec["layers"], spec["heads"], spec["length"])
    others = [] if role == "first" else [_hear()]
    dht = hivemind.DHT(start=True, host_maddrs=["/ip4/127.0.0.1/tcp/0"], initial_peers=others, use_relay=False, use_auto_relay=False)
    if role == "first":
        _say(str(dht.get_visible_maddrs()[0]))
    optimizer = hivemind.Optimizer(
        dht=dht,
        run_id="slow-link",
        target_batch_size=2 * spec["steps_per_round"] * spec["batch"],
        batch_size_per_step=spec["batch"],
        params=model.parameters(),
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=1e-3),
        use_local_updates=True,
        delay_state_averaging=True,
        delay_optimizer_step=False,
        state_averaging_compression=Float16Compression(),
        matchmaking_time=3.0,
        averager_opts={"request_timeout": 1.0},
        averaging_timeout=60.0,
        tracker_opts={"min_refresh_period": 0.2, "default_refresh_period": 0.5},
    )

    def step() -> float:
        """How long the optimizer took."""
        tokens_BL = torch.randint(256, (spec["batch"], spec["length"] + 1))
        loss = nn.functional.cross_entropy(model(tokens_BL[:, :-1]).flatten(0, 1), tokens_BL[:, 1:].flatten())
        loss.backward()
        before = time.monotonic()
        optimizer.step()
        optimizer.zero_grad()
        return time.monotonic() - before

    while optimizer.tracker.global_progress.num_peers < 2:
        step()
    started, first = time.monotonic(), optimizer.local_epoch
    waited = sum(step() for _ in range(spec["steps"]))
    whole, rounds = time.monotonic() - started, optimizer.local_epoch - first
    _say({"busy": 1 - waited / whole, "rounds": rounds, "seconds": whole, "parameters": sum(one.numel() for one in model.parameters())})
    while True:  # the other may not be done yet
        step()


def _hear() -> Any:
    return json.loads(sys.stdin.readline())


def _say(what: object) -> None:
    print(json.dumps(what), flush=True)


if __name__ == "__main__":
    main()
