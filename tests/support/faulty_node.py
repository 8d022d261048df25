"""A machine that holds layers and has a fault: the real code, which goes wrong after some batches.

As a process: `python -m tests.support.faulty_node FAULT AFTER ADDRESS TOKEN KEY NAME`.
"""

from __future__ import annotations

import sys
from collections.abc import Callable

import torch
from torch import Tensor

from shoal.protocol.messages import Frame
from shoal.serve.nodes.layer_host import LayerHost
from shoal.serve.nodes.messages import Endpoint
from shoal.serve.nodes.node import NodeProcess, NodeReport

OUTPUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "nan": lambda y_BLD: torch.full_like(y_BLD, float("nan")),
    "one infinity": lambda y_BLD: torch.cat([y_BLD[..., :-1], torch.full_like(y_BLD[..., -1:], float("inf"))], -1),
    "shape": lambda y_BLD: y_BLD[..., :3].clone(),
    "rows": lambda y_BLD: torch.cat([y_BLD, y_BLD]),
    "type": lambda y_BLD: y_BLD.double(),
    "integers": lambda y_BLD: y_BLD.to(torch.int64),
}
"""Faults of the output."""
FAULTS = (*OUTPUTS, "silent", "error", "fails others", "never sends", "two faces")


class FaultyNode(NodeProcess):
    """Has a fault after its first batches. `fault` may be changed while it runs; "": none."""

    fault, after = "", 5
    reads, sent_others = 0, 0
    claimed_share = 1.0
    """Share of its time for a layer that it claims."""

    def _enter(self) -> LayerHost:
        host = super()._enter()
        read = host.read

        def faulty(layers, token_batch, x_BLD):
            self.reads += 1
            y_BLD = read(layers, token_batch, x_BLD)
            if not self.is_faulty:
                return y_BLD
            if self.fault == "silent":
                self._stopping.wait()
            if self.fault == "error":
                raise RuntimeError("this machine is broken")
            return OUTPUTS.get(self.fault, torch.Tensor.clone)(y_BLD)

        host.read = faulty
        hand_on = self.peer_sender.hand_on

        def lying(command, int8):
            if self.is_faulty and self.fault == "never sends":
                return True
            if self.is_faulty and self.fault == "two faces":
                command = command._replace(x_BLD=OUTPUTS["nan"](command.x_BLD))
            return hand_on(command, int8)

        self.peer_sender.hand_on = lying
        return host

    @property
    def is_faulty(self) -> bool:
        return bool(self.fault) and self.reads > self.after

    def _ask(self, header: dict, frames: tuple[Frame, ...] = ()):
        if header.get("kind") == "turn" and self.is_faulty and self.fault == "fails others":
            report = NodeReport()
            report.done += header["done"]
            report.done += [{"kind": "failed", "trip": trip, "problem": "not mine"} for trip in range(300) if trip not in self.own(header)]
            header = {**header, "done": report.done}
            self.sent_others += 1
        if header.get("kind") == "enter":
            header = {**header, "layer_s": header["layer_s"] * self.claimed_share}
        return super()._ask(header, frames)

    @staticmethod
    def own(header: dict) -> set[int]:
        return {done["trip"] for done in header["done"] if "trip" in done}


def main(fault: str, after: str, address: str, token: str, key: str, name: str) -> None:
    node = FaultyNode(Endpoint(address, token, key or None), name, slowdown=1.0, patience_s=60.0, tell=print)
    node.fault, node.after, node.claimed_share = fault, int(after), 0.2  # so it gets layers for certain
    node.work()


if __name__ == "__main__":
    main(*sys.argv[1:])
