"""CUDA graphs: the passes of a batch are recorded once for each shape of batch, and replayed from then on.

A small model's step is hundreds of short kernels, and launching them takes longer than computing them. A recorded graph launches all of
them at once. Replayed kernels read and write the same memory each time: the batch is copied to their input, and gradients are read from
their output.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from shoal.config.schema.training import Training
from shoal.errors import ShoalError
from shoal.tasks import Batch, Loss

_MOST = 4
"""Shapes of batches that are recorded: the usual one, and those at the end of an epoch."""


def check(training: Training, device: torch.device) -> None:
    """Refuse to record where there is no CUDA GPU."""
    if training.cuda_graph and device.type != "cuda":
        raise ShoalError(f"training.cuda_graph records what a CUDA GPU does, and this run computes on {device.type}: set it to false")


class RecordedPass(NamedTuple):
    graph: Any
    inputs: Batch
    share: Tensor
    """The factor of the loss and the metrics."""
    names: list[str]
    figures: Tensor
    gradients: list[Tensor | None]


class PassRecorder:
    """Records and replays passes. `passes` gives the loss of a batch; `backward` takes its gradients; `before` is called before a pass
    whose results do not count is taken again."""

    def __init__(
        self,
        parameters: list[nn.Parameter],
        passes: Callable[[Batch], Loss],
        backward: Callable[[Tensor], None],
        before: Callable[[], None],
    ) -> None:
        self._parameters, self._passes, self._backward, self._before = parameters, passes, backward, before
        self._recordings: dict[tuple[Any, ...], RecordedPass] = {}

    def replay(self, batch: Batch, share: float) -> Iterator[tuple[str, Tensor]]:
        """Take a batch's gradients, which are then the parameters' own, and return its figures."""
        key = tuple((name, value.shape, value.dtype) for name, value in batch.items())
        if key not in self._recordings:
            self._recordings[key] = self._record(batch)
        recording = self._recordings[key]
        for name, value in batch.items():
            recording.inputs[name].copy_(value, non_blocking=True)
        recording.share.fill_(share)
        recording.graph.replay()
        for parameter, gradient in zip(self._parameters, recording.gradients, strict=True):
            parameter.grad = gradient
        return zip(recording.names, recording.figures.clone().unbind(), strict=True)

    def _record(self, batch: Batch) -> RecordedPass:
        if len(self._recordings) == _MOST:
            raise ShoalError(
                f"training.cuda_graph: batches have more than {_MOST} shapes, and each would be recorded; set it to false, or pad the data"
            )
        inputs = {name: value.to("cuda", copy=True) for name, value in batch.items()}
        share = torch.ones((), device="cuda")
        self._compile(inputs, share)
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(graph, capture_error_mode="thread_local"):
                names, figures = self._pass(inputs, share)
        except RuntimeError as error:
            said = str(error).splitlines()[0]
            raise ShoalError(f"training.cuda_graph: this model's passes cannot be recorded, set it to false ({said})") from None
        return RecordedPass(graph, inputs, share, names, figures, [parameter.grad for parameter in self._parameters])

    def _compile(self, inputs: Batch, share: Tensor) -> None:
        """Run the passes without recording first, so that first-use initialisation is done. The random number state is restored."""
        random = torch.cuda.get_rng_state()
        side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(2):
                self._pass(inputs, share)
                self._before()
        torch.cuda.current_stream().wait_stream(side)
        torch.cuda.synchronize()
        torch.cuda.empty_cache()  # memory cached for the other stream would stay unused
        torch.cuda.set_rng_state(random)

    def _pass(self, inputs: Batch, share: Tensor) -> tuple[list[str], Tensor]:
        loss = self._passes(inputs)
        self._backward(loss.value * share)
        return [*loss.metrics], torch.stack([figure.detach().float() for figure in loss.metrics.values()]) * share
