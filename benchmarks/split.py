"""Layers over machines that are 1, 2 and 4 times slower than another: the split that is computed against an equal one, tokens/s.

The machines are processes here, of which the slow ones sleep; a random model of 24 layers, eight answers at once.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager

import torch
from run import Row

from shoal.config.schema import model as schema
from shoal.config.schema.cluster import Zmq
from shoal.config.schema.serving import Serving
from shoal.data.text.chat_template import plain_template
from shoal.data.text.tokenizers.own import ByteTokenizer
from shoal.models.generation.decoding import TokenDraws, Warp
from shoal.models.gpt import Gpt
from shoal.serve.batching.batching_engine import BatchingEngine
from shoal.serve.batching.generation_job import GenerationJob
from shoal.serve.load_model import ServedModel
from shoal.serve.nodes.distributed_model import DistributedModel
from shoal.serve.nodes.layer_host import LayerRange
from shoal.serve.nodes.model_description import describe_own_model
from shoal.serve.nodes.placement import LayerPlanner, NodeState, RouteStage
from shoal.transports.connect import serve
from shoal.transports.interface import ListenOptions
from shoal.transports.keys import new_token

SETTINGS = schema.Gpt(hidden_size=384, num_layers=24, num_heads=6, max_seq_len=128)
SLOWDOWNS = (1, 2, 4)
STREAMS, TOKENS = 8, 40


class Equal(LayerPlanner):
    """Each machine has as many layers as every other."""

    def fastest_split(self, nodes: Sequence[NodeState]) -> tuple[RouteStage, ...] | None:
        bounds = [len(self.costs) * i // len(nodes) for i in range(len(nodes) + 1)]
        return tuple(node.stage(LayerRange(bounds[i], bounds[i + 1])) for i, node in enumerate(nodes))


def measure() -> list[Row]:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = Gpt(SETTINGS, 257).eval()
    rates = {}
    for kind in (LayerPlanner, Equal):
        with spread(model, kind) as stages:
            written(stages)
            start = time.perf_counter()
            rates[kind] = written(stages) / (time.perf_counter() - start)
            assert stages.placement.current is not None
            layers = [(stop.name, stop.layers.last - stop.layers.first) for stop in stages.placement.current.stages]
            print("   ", kind.__name__, layers, file=sys.stderr)
    ratio = rates[LayerPlanner] / rates[Equal]
    return [Row("min–max split, slowdowns 1, 2, 4", rates[LayerPlanner], rates[Equal], "tokens/s", ratio, "≥ 1.5", "equal split beside it")]


@contextmanager
def spread(model: Gpt, kind: type[LayerPlanner]) -> Iterator[DistributedModel]:
    """This process, and one for each slowdown after the first."""
    token = new_token()
    server = serve(Zmq(port=0), ListenOptions(("127.0.0.1",), token, None, 1 << 26))
    described = describe_own_model(SETTINGS, model)
    served = ServedModel(
        "bench", model, ByteTokenizer(), plain_template(ByteTokenizer()), Serving(), (), frozenset(), len(SLOWDOWNS), described=described
    )
    stages = DistributedModel(served, server, lambda text: None)
    stages.placement.planner = kind(stages.placement.planner.sizes, stages.placement.planner.bytes_of_one, 0)
    with ExitStack() as ended:
        ended.callback(stages.close)
        for slowdown in SLOWDOWNS[1:]:
            words = ["join", server.address, "--node", "--token", token, "--slowdown", str(slowdown), "--patience", "5"]
            node = subprocess.Popen(
                [sys.executable, "-m", "shoal", *words], stdout=subprocess.DEVNULL, env=os.environ | {"OMP_NUM_THREADS": "1"}
            )
            ended.callback(node.wait)
            ended.callback(node.terminate)
        while stages.placement.current is None:
            time.sleep(0.05)
        yield stages


def written(stages: DistributedModel) -> int:
    """Tokens that were written: eight answers at once, to their ends."""
    engine = BatchingEngine(stages, most_running=STREAMS, most_waiting=STREAMS, clock=time.monotonic)
    engine.submit(*(GenerationJob([i + 1] * 8, TOKENS, TokenDraws(i, [i]), lambda heard: False, Warp(1.0)) for i in range(STREAMS)))
    while engine.busy:
        engine.step()
    return engine.tokens_written
