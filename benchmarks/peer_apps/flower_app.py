"""Flower's side of rounds.py and stragglers.py: FedAvg of an MLP on MNIST. It runs in Flower's environment, without Shoal.

Two of Flower's runtimes: `simulation` (what `flwr run` uses: one Ray actor per client, in-memory grid) and `grpc` (`start_server` and
`start_client`, deprecated since 1.13 but shipped: a process per client and a bidirectional stream that nobody polls). The real
SuperLink is not among them: its grid sleeps 3 s between looks for replies, so no round can be shorter.

A client keeps its data and its model between rounds. `python -c "import flower_app; flower_app.main()" JSON` prints one line of JSON.
"""

from __future__ import annotations

import contextlib
import functools
import gzip
import itertools
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

SPEC = "SHOAL_FLOWER_SPEC"


class Spec(NamedTuple):
    """What is asked for. It travels to every client in the environment."""

    mnist: str
    runtime: str = "simulation"
    clients: int = 2
    rounds: int = 10
    hidden: tuple[int, ...] = (128, 128)
    batch_size: int = 32
    steps: int = 1
    """Steps of a client in a round."""
    epochs: float = 0.0
    """Instead of steps: epochs of its own data in a round."""
    optimizer: str = "SGD"
    learning_rate: float = 0.1
    keep_optimizer: bool = False
    """Whether a client's optimizer lives on from round to round."""
    slowdown: tuple[float, ...] = ()
    dropout: float = 0.0
    fraction: float = 1.0
    timeout: float | None = None
    """Seconds after which a round closes without who is late."""
    target: float = 0.0
    """Accuracy to stop at; 0: all rounds, no evaluation."""
    seed: int = 0


class Reached(Exception):
    """The accuracy is there: nothing else is to be done."""


@functools.cache
def spec() -> Spec:
    given = json.loads(os.environ[SPEC])
    return Spec(**{name: tuple(value) if isinstance(value, list) else value for name, value in given.items()})


# --- the model and its data: plain PyTorch --------------------------------------------------------------


@functools.cache
def images(part: str) -> tuple[Tensor, Tensor]:
    folder = Path(spec().mnist)
    raw, labels = (gzip.decompress((folder / f"{part}-{name}-ubyte.gz").read_bytes()) for name in ("images-idx3", "labels-idx1"))
    pixels = torch.from_numpy(np.frombuffer(raw, np.uint8, offset=16).reshape(-1, 784).astype(np.float32) / 255.0)
    return pixels, torch.from_numpy(np.frombuffer(labels, np.uint8, offset=8).astype(np.int64))


def network() -> nn.Module:
    """Layer by layer what Shoal's model of kind mlp is."""
    torch.manual_seed(spec().seed)
    sizes = (784, *spec().hidden)
    hidden = [layer for pair in itertools.pairwise(sizes) for layer in (nn.Linear(*pair), nn.LayerNorm(pair[1]), nn.ReLU())]
    return nn.Sequential(nn.LayerNorm(784, elementwise_affine=False), *hidden, nn.Linear(sizes[-1], 10))


class Client:
    """One client's share of the data, its model and its optimizer."""

    def __init__(self, number: int) -> None:
        given = spec()
        self.number = number
        everything, labels = images("train")
        order = torch.randperm(len(everything), generator=torch.Generator().manual_seed(given.seed))[number :: given.clients]
        self.inputs, self.labels = everything[order], labels[order]
        self.model = network().train()
        self.random = torch.Generator().manual_seed(1000 * given.seed + number)
        self.batches = self._forever()
        self.optimizer = self._new_optimizer()
        size = given.batch_size
        self.steps = max(1, round(given.epochs * len(order) / size)) if given.epochs else given.steps

    def _new_optimizer(self) -> torch.optim.Optimizer:
        given = spec()
        fused = {"fused": True} if given.optimizer in ("SGD", "Adam", "AdamW") else {}
        return getattr(torch.optim, given.optimizer)(self.model.parameters(), lr=given.learning_rate, **fused)

    def _forever(self) -> Iterator[tuple[Tensor, Tensor]]:
        size = spec().batch_size
        while True:
            order = torch.randperm(len(self.inputs), generator=self.random)
            for start in range(0, len(order) - size + 1, size):
                index = order[start : start + size]
                yield self.inputs[index], self.labels[index]

    def train(self, arrays: list[np.ndarray]) -> list[np.ndarray] | None:
        """A round's work; None where its result gets lost."""
        started = time.monotonic()
        with torch.no_grad():
            for parameter, value in zip(self.model.parameters(), arrays, strict=True):
                parameter.copy_(torch.from_numpy(value))
        if not spec().keep_optimizer:
            self.optimizer = self._new_optimizer()
        for _ in range(self.steps):
            inputs, labels = next(self.batches)
            self.optimizer.zero_grad(set_to_none=True)
            nn.functional.cross_entropy(self.model(inputs), labels).backward()
            self.optimizer.step()
        slower = spec().slowdown[self.number] if spec().slowdown else 1.0
        time.sleep((slower - 1) * (time.monotonic() - started))
        lost = float(torch.rand(1, generator=self.random)) < spec().dropout
        return None if lost else weights(self.model)


def weights(model: nn.Module) -> list[np.ndarray]:
    return [parameter.detach().numpy().copy() for parameter in model.parameters()]


@functools.cache
def client(number: int) -> Client:
    return Client(number)


class Watch:
    """Times rounds, and judges the weights after each where a target is set."""

    def __init__(self) -> None:
        self.started = 0.0
        self.times: list[float] = []
        self.accuracies: list[float] = []
        self.model = network().eval()

    def begin(self) -> None:
        """All clients are there, with their data in memory."""
        self.started = time.monotonic()

    def after(self, arrays: list[np.ndarray]) -> None:
        if spec().target:
            inputs, labels = images("t10k")
            with torch.no_grad():
                for parameter, value in zip(self.model.parameters(), arrays, strict=True):
                    parameter.copy_(torch.from_numpy(value))
                self.accuracies.append(float((self.model(inputs).argmax(1) == labels).float().mean()))
        self.times.append(time.monotonic())
        if spec().target and self.accuracies[-1] >= spec().target:
            raise Reached

    def report(self) -> None:
        print(json.dumps({"times": [at - self.started for at in self.times], "accuracies": self.accuracies}), flush=True)


# --- the simulation runtime ---------------------------------------------------------------------------


def simulate(watch: Watch) -> None:
    from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
    from flwr.clientapp import ClientApp
    from flwr.serverapp import Grid, ServerApp
    from flwr.serverapp.strategy import FedAvg
    from flwr.simulation import run_simulation

    given = spec()
    client_app, server_app = ClientApp(), ServerApp()

    @client_app.query()
    def prepare(message: Message, context: Context) -> Message:
        for number in range(given.clients):  # any actor may be asked to be any client
            client(number)
        time.sleep(1.0)  # so that each actor gets one of these
        return Message(RecordDict(), reply_to=message)

    @client_app.train()
    def train(message: Message, context: Context) -> Message:
        trained = client(int(context.node_config["partition-id"])).train(message.content["arrays"].to_numpy_ndarrays())
        if trained is None:
            raise RuntimeError("dropped out")
        return Message(RecordDict({"arrays": ArrayRecord(trained), "metrics": MetricRecord({"num-examples": 1})}), reply_to=message)

    @server_app.main()
    def serve(grid: Grid, context: Context) -> None:
        while len(nodes := list(grid.get_node_ids())) < given.clients:
            time.sleep(0.1)
        for _ in range(2):
            grid.send_and_receive([Message(RecordDict(), node, "query") for node in nodes])
        strategy = FedAvg(
            fraction_train=given.fraction,
            fraction_evaluate=0.0,
            min_train_nodes=max(1, round(given.fraction * given.clients)),
            min_available_nodes=given.clients,
        )
        watch.begin()
        with contextlib.suppress(Reached):
            strategy.start(
                grid=grid,
                initial_arrays=ArrayRecord(weights(network())),
                num_rounds=given.rounds,
                timeout=given.timeout or 3600.0,
                evaluate_fn=lambda number, arrays: watch.after(arrays.to_numpy_ndarrays()) if number else None,
            )
        watch.report()

    cores = os.cpu_count() or 1
    resources = {"client_resources": {"num_cpus": cores / given.clients, "num_gpus": 0.0}}
    run_simulation(server_app, client_app, num_supernodes=given.clients, backend_config=resources)


# --- the gRPC runtime ---------------------------------------------------------------------------------


def join(address: str, number: int) -> None:
    """A client's process."""
    from flwr.client import Client as FlowerClient
    from flwr.client import start_client
    from flwr.common import Code, FitIns, FitRes, Status, ndarrays_to_parameters, parameters_to_ndarrays

    own = client(number)

    class Wrapped(FlowerClient):
        def fit(self, ins: FitIns) -> FitRes:
            trained = own.train(parameters_to_ndarrays(ins.parameters))
            if trained is None:
                return FitRes(Status(Code.FIT_NOT_IMPLEMENTED, "dropped out"), ins.parameters, 0, {})
            return FitRes(Status(Code.OK, ""), ndarrays_to_parameters(trained), 1, {})

    start_client(server_address=address, client=Wrapped(), insecure=True, max_wait_time=60.0)


def over_grpc(watch: Watch) -> None:
    from flwr.common import ndarrays_to_parameters
    from flwr.server import ServerConfig, start_server
    from flwr.server.strategy import FedAvg

    given = spec()
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    code = "import sys, flower_app; flower_app.join(sys.argv[1], int(sys.argv[2]))"
    clients = [subprocess.Popen([sys.executable, "-c", code, address, str(number)], stdout=sys.stderr) for number in range(given.clients)]

    class Waiting(FedAvg):
        def configure_fit(self, server_round: int, parameters: Any, client_manager: Any) -> Any:
            if server_round == 1:
                client_manager.wait_for(given.clients)
                watch.begin()
            return super().configure_fit(server_round, parameters, client_manager)

    strategy = Waiting(
        fraction_fit=given.fraction,
        fraction_evaluate=0.0,
        min_fit_clients=max(1, round(given.fraction * given.clients)),
        min_available_clients=given.clients,
        accept_failures=True,
        initial_parameters=ndarrays_to_parameters(weights(network())),
        evaluate_fn=lambda number, arrays, config: watch.after(arrays) if number else None,
    )
    with contextlib.suppress(Reached):
        start_server(server_address=address, config=ServerConfig(num_rounds=given.rounds, round_timeout=given.timeout), strategy=strategy)
    watch.report()
    for process in clients:
        process.terminate()
    for process in clients:
        process.wait()


def main() -> None:
    os.environ[SPEC] = sys.argv[1]
    watch = Watch()
    {"simulation": simulate, "grpc": over_grpc}[spec().runtime](watch)
    sys.stdout.flush()
    os._exit(0)  # threads of the runtime may still wait for clients that are late
