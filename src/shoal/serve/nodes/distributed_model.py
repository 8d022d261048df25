"""A model that is served from several machines: the pipeline, the server's own layers, and the server that machines join."""

from __future__ import annotations

import hashlib
import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from shoal.config.environment import state_folder
from shoal.engines.single import choose_device
from shoal.errors import ShoalError
from shoal.models.generation.decoding import Warp, choose
from shoal.models.gpt import Attention
from shoal.models.kernels.cpu_packing import pack_matrices
from shoal.models.packed.layers import PackedLayer, byte_count, number_count
from shoal.models.packed.model import Get
from shoal.models.split_model import ModelEnds, layer_modules, make_ends
from shoal.models.stages import load_tensors, required_tensors
from shoal.runs.invitation import Invitation, listen
from shoal.serve.backend import LONGEST_UNBOUNDED, reads_beside, refuse_unserved
from shoal.serve.batching.backend_interface import moving_average
from shoal.serve.load_model import ServedModel
from shoal.serve.nodes.layer_host import LayerHost, LayerRange, memory_for_layers
from shoal.serve.nodes.node import FRAME_BYTES
from shoal.serve.nodes.pipeline import NodePipeline
from shoal.serve.nodes.placement import SERVER_NODE, LayerSize, NodeState
from shoal.serve.nodes.server import LocalNode, NodeServer
from shoal.serve.nodes.weights import WeightStore
from shoal.serve.serving_memory import answers_over_nodes
from shoal.transports import Server

_MEASURED = 8
_WINDOW_S = 60.0
"""Longest time between two plans for which the server's processor time is used: in a longer one it was mostly idle."""
_ROWS = 4
"""Requests in the batch that compares the ends with a layer: with several, the output matrix costs more relative to a layer."""


class DistributedModel(NodePipeline):
    """A pipeline with the server's own layers and the server that other machines join."""

    def __init__(self, served: ServedModel, server: Server, tell: Callable[[str], None]) -> None:
        refuse_unserved(served.model)
        if reads_beside(served.model):
            raise ShoalError("a model that reads passages, a context or its memory is served by one machine: --nodes 1")
        if served.described is None:
            raise ShoalError("this model cannot be made on other machines; --nodes 1 serves it from this one alone")
        tensors = served.tensors or WeightStore(served.model.state_dict())
        own = next(served.model.parameters()).device
        device = choose_device(served.run.training.device if served.run is not None else "cpu" if own.type == "meta" else own.type)
        get, ends = _getter(served, tensors, device), make_ends(served.model)
        if any(parameter.is_meta for parameter in ends.parameters()):
            load_tensors(ends, {name: get(name) for name in required_tensors(ends)})
        ends.to(device)
        pack_matrices(ends, memory_for_layers(device))
        longest = min(ends.max_seq_len or LONGEST_UNBOUNDED, LONGEST_UNBOUNDED)
        sizes, tokens = layer_sizes(served.model, ends), longest * answers_over_nodes(served.settings) + served.settings.prefix_cache_tokens
        can_rewind, even = getattr(served.model, "joins_rows", True), served.settings.spread == "even"
        super().__init__(ends, sizes, expected=served.nodes, cache_tokens=tokens, can_rewind=can_rewind, even=even, tell=tell)
        host = LayerHost(lambda: served.model, get, self.ends.device)
        layer_s, crowded_s = host.measure(self.ends.width), host.measure(self.ends.width, _ROWS)
        self.placement.batch_slowdown = max(0.0, crowded_s / layer_s - 1) / (_ROWS - 1)
        host.drop(LayerRange(0, 1))
        self.node_server = NodeServer(server, self, tensors, served.described, tell, int8=served.settings.hidden_states == "int8")
        node = NodeState(SERVER_NODE, layer_s, float(memory_for_layers(self.ends.device)), self._measured_ends() / crowded_s * layer_s)
        self.local_node = LocalNode(self, host, node)
        self._spent = self._now_spent()
        self.local_node.start()
        self.add(node)
        self.node_server.start()

    @torch.inference_mode()
    def _measured_ends(self) -> float:
        """Seconds for the embedding, the head and the choice of the next token of `_ROWS` requests."""
        taken, ids_B1 = [], torch.zeros(_ROWS, 1, dtype=torch.long, device=self.ends.device)
        for _ in range(_MEASURED):
            start = time.perf_counter()
            choose(self.ends.result(self.ends.modules.embed(ids_B1), None), [Warp(0.0)] * _ROWS, [0.0] * _ROWS)
            taken.append(time.perf_counter() - start)
        return min(taken)

    def replan(self, weight: float) -> None:
        """Also update the server's time for messages, threads and answers, which can be measured only while it serves."""
        before, self._spent = self._spent, self._now_spent()
        wall_s, all_s, layers_s = (now - then for now, then in zip(self._spent, before, strict=True))
        if self.ends.device.type == "cpu" and wall_s < _WINDOW_S:
            self.local_node.node.fixed_s = moving_average(
                self.local_node.node.fixed_s, max(0.0, all_s / torch.get_num_threads() - layers_s) / weight
            )
        super().replan(weight)

    def _now_spent(self) -> tuple[float, float, float]:
        """Wall-clock time, processor time of this process, and the part of it that its layers took."""
        return time.monotonic(), time.process_time(), self.local_node.computed_s

    def close(self) -> None:
        self.node_server.close()
        self.local_node.close()


def _getter(served: ServedModel, tensors: WeightStore, device: torch.device) -> Get:
    """Gets the tensors of the served model for the server's own layers."""
    if served.packed is not None:
        return served.packed.getter(device)
    own = served.gpt_conversion
    return tensors.get if own is None else lambda name: own.tensor(name, tensors.get)


def layer_sizes(model: Any, ends: ModelEnds) -> list[LayerSize]:
    """What the layers of a model take, whose weights need not be loaded. Caches have the type of the hidden states."""
    x_11D = ends.embed(torch.zeros(1, 1, dtype=torch.long, device=next(ends.parameters()).device))
    found = []
    for layer in layer_modules(model):
        attention = getattr(layer, "attention", None)
        width = attention.kv_heads * attention.head_size if isinstance(attention, Attention) else x_11D.shape[-1]
        found.append(LayerSize(number_count(layer), _stored_bytes(layer, x_11D.dtype), 2 * width * x_11D.element_size()))
    return found


def _stored_bytes(layer: nn.Module, dtype: torch.dtype) -> int:
    """A layer of transformers is made in float32 and holds its weights in the type of the hidden states."""
    size = byte_count(layer)
    packed = any(isinstance(one, PackedLayer) for one in layer.modules())
    return size if packed else size * dtype.itemsize // 4


def open_server(served: ServedModel, hosts: tuple[str, ...]) -> tuple[Server, Invitation]:
    """The server that machines join; for a model that was served before, with the same port and keys."""
    assert served.run is not None
    return listen(served.run, served.run.transport, hosts, _folder(served.name), FRAME_BYTES, served.nodes)


def open_local_server(served: ServedModel) -> tuple[Server, Invitation]:
    """The server that child processes join: on any free port, with temporary keys."""
    assert served.run is not None
    with tempfile.TemporaryDirectory(prefix="shoal-door-") as folder:
        return listen(served.run, served.run.transport.replace(port=0), ("127.0.0.1",), Path(folder), FRAME_BYTES, served.nodes)


def _folder(name: str) -> Path:
    """The folder of the token and the keys, readable by this user alone."""
    folder = state_folder() / "serving" / hashlib.sha256(name.encode()).hexdigest()[:12]
    folder.mkdir(parents=True, exist_ok=True)
    os.chmod(folder, 0o700)
    return folder
