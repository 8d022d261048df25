"""A transformer whose feed-forward layers are mixtures of experts.

Shapes: L layers, E experts.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any, Self

import torch
from torch import Tensor, nn

from shoal.config import Run
from shoal.config.data_shapes import DataShapes, vocab_size_for
from shoal.config.schema import model as schema
from shoal.models.compile_rules import not_compiled
from shoal.models.gpt import Attention, FeedForward
from shoal.models.layers.cross_attention import ContextEncoder, WithCrossAttention, attends_to_context, has_context
from shoal.models.layers.episodic_memory import EpisodicMemory
from shoal.models.layers.expert_layer import ExpertLayer
from shoal.models.layers.mixture_of_heads import MixtureOfHeads
from shoal.models.layers.multi_token import MultiTokenHead
from shoal.models.routers import HeldExperts
from shoal.models.routers.sigmoid_bias import SigmoidBiasRouter
from shoal.models.step_state import StepState
from shoal.models.transformer import PLAIN, AuxiliaryLoss, BlockPart, LayerInputs, LookAhead, SideChannel, SideOutputs, Trunk, Variant


class Moe(Trunk):
    """Transformer with expert layers. Auxiliary losses: load balance and z-loss."""

    conversion: Any = None
    """How its tensors follow from those of a Hugging Face model, where it computes one: see `huggingface/as_gpt.py`."""

    def __init__(self, settings: schema.Moe, vocab_size: int, held: HeldExperts = None, variant: Variant = PLAIN) -> None:
        reader = ContextEncoder(settings) if has_context(settings) else None
        parts = partial(block_parts, settings, vocab_size, held, variant)
        super().__init__(settings, vocab_size, parts, settings.initializer_range, reader, variant)
        self.dense_layers = settings.experts.dense_layers
        self.mtp = MultiTokenHead(settings, variant) if settings.mtp.enabled else None
        self.memory = EpisodicMemory(settings, vocab_size) if settings.episodic_memory.enabled else None
        self.head_balance_weight = settings.mixture_of_heads.balance_weight
        routed = [part.routed for part in self.modules() if isinstance(part, MixtureOfHeads)]
        self.head_loads = StepLoads(range(settings.num_layers), routed[0]) if routed else None
        experts = settings.experts
        self.balance_weight = experts.aux_loss_weight
        if experts.z_loss_weight:
            self.loss_weights["z_loss"] = experts.z_loss_weight
        routers = [router for router in self.modules() if isinstance(router, SigmoidBiasRouter)]
        self.loads = Loads(range(self.dense_layers, settings.num_layers), experts.count, routers, held)

    def only(self, first: int, last: int) -> Self:
        """The layers [first, last), with load counters of their own, in the same order."""
        part = super().only(first, last)
        part.mtp = None
        part.head_loads = StepLoads(range(first, last), self.head_loads.load_LE.shape[1]) if self.head_loads is not None else None
        routers = [router for router in part.blocks.modules() if isinstance(router, SigmoidBiasRouter)]
        layers = range(max(first, self.dense_layers), max(last, self.dense_layers))
        part.loads = Loads(layers, self.loads.reported_LE.shape[1], routers, tuple(self.loads.held))
        part.loads.reports = self.loads.reports
        return part

    def record_outputs(self, outputs: list[SideOutputs], beside: SideChannel) -> None:
        super().record_outputs(outputs, beside)
        self._balance("", self.balance_weight, self.loads, outputs, beside)
        if self.head_loads is not None:
            self._balance("head_", self.head_balance_weight, self.head_loads, outputs, beside)

    def look_ahead(self, embedded_BLD: Tensor, x_BLD: Tensor, inputs: LayerInputs, beside: SideChannel) -> None:
        if self.mtp is not None and self.training and beside.counted_BL is not None:
            recomputes = self.checkpointing and torch.is_grad_enabled()
            beside.ahead = LookAhead(self.mtp(embedded_BLD, x_BLD, inputs, recomputes), False, self.mtp.weight)

    def _balance(self, what: str, weight: float, loads: StepLoads, outputs: list[SideOutputs], beside: SideChannel) -> None:
        """Add the balance loss: number of experts (or heads) × Σ share of the choices · mean probability; 1 for uniform use."""
        end = "R" if what else "E"
        routed = [own for own in outputs if f"{what}load_{end}" in own]
        if not routed:
            return
        load_LE = torch.stack([own[f"{what}load_{end}"] for own in routed])
        shares_LE = loads.shares(load_LE, self.training, learning=torch.is_grad_enabled())
        if not all(f"{what}probability_{end}" in own for own in routed):
            return
        probability_LE = torch.stack([own[f"{what}probability_{end}"] for own in routed])
        balance_L = shares_LE.shape[1] * (shares_LE * probability_LE).sum(1)
        beside.figures |= {f"layers/{layer}/{what}balance": one for layer, one in zip(loads.layers, balance_L.detach(), strict=True)}
        if weight:
            layers = self.depth if what else self.depth - self.dense_layers
            beside.losses.append(AuxiliaryLoss(f"{what}balance", weight, balance_L.sum() / layers))


class StepLoads(StepState):
    """How often each expert (or routed head) of each layer was chosen in this step, over all processes and batches so far."""

    def __init__(self, layers: range, count: int) -> None:
        """`layers`: the numbers of the layers."""
        super().__init__()
        self.layers = layers
        self.register_buffer("load_LE", torch.zeros(len(layers), count), persistent=False)
        self.seen = False
        """Whether there was a batch; reading the loads would synchronise with the GPU."""

    load_LE: Tensor

    @not_compiled
    @torch.no_grad()
    def shares(self, load_LE: Tensor, training: bool, *, learning: bool) -> Tensor:
        """Shares of the choices: of this step so far in training; of this batch over all processes where a policy in evaluation mode
        learns from answers; of this batch otherwise."""
        if training or learning:
            load_LE = self.total(load_LE if self.counting else torch.zeros_like(load_LE))
        if training:
            load_LE = self.load_LE.add_(load_LE)  # in place: CUDA graphs keep the address
            self.seen = True
        return load_LE / load_LE.sum(1, keepdim=True).clamp(min=1)

    def begin_step(self) -> None:
        self.load_LE = self.load_LE.float().zero_()

    def merge_layers(self, part: StepState, total: Callable[[Tensor], Tensor]) -> None:
        assert isinstance(part, StepLoads)
        first = part.layers.start - self.layers.start
        self.load_LE[first : first + len(part.load_LE)] = part.load_LE
        self.load_LE = total(self.load_LE)
        self.seen = True


class Loads(StepLoads):
    """Expert loads, and the router biases that follow from them."""

    def __init__(self, layers: range, experts: int, routers: list[SigmoidBiasRouter], held: HeldExperts = None) -> None:
        self.held = [*range(experts)] if held is None else [*held]
        super().__init__(layers, len(self.held))
        self.register_buffer("reported_LE", torch.zeros(len(layers), experts), persistent=False)
        self.reports = False
        """Whether workers report each expert's share of the choices. A coordinator has those of its last round."""
        # Not as submodules: the blocks own them
        self.__dict__["routers"] = routers
        self._decided: list[Tensor] = []
        self._moved: list[Tensor] = []

    reported_LE: Tensor
    routers: list[SigmoidBiasRouter]

    def end_step(self) -> None:
        self._decided = [router.movement(load_E) for router, load_E in zip(self.routers, self.load_LE, strict=False)]
        now = [*self._decided, *([self._load_of_all()] if self.reports else [])]
        self._moved = [before + one for before, one in zip(self._moved, now, strict=True)] if self._moved else now

    def figures(self) -> dict[str, Tensor]:
        """Imbalance of the step's loads. The entropy is normalised: 1 for uniform loads, 0 for one expert."""
        experts = self.load_LE.shape[1]
        share_LE = self._shares()
        entropy_L = torch.special.entr(share_LE).sum(1) / math.log(max(2, experts))
        by_name = {
            "load_excess": experts * share_LE.amax(1) - 1,
            "dead_experts": (share_LE == 0).sum(1).float(),
            "load_entropy": entropy_L,
        }
        return {
            f"layers/{layer}/{name}": value
            for name, values_L in by_name.items()
            for layer, value in zip(self.layers, values_L, strict=False)
        }

    def details(self) -> dict[str, Tensor]:
        """Each expert's share of the choices of the step; at a coordinator, which computes no steps, of its last round."""
        share_LE, held = self._shares(), self.held
        if not len(share_LE) and self.reported_LE.any():
            share_LE, held = self.reported_LE, [*range(self.reported_LE.shape[1])]
        return {
            f"layers/{layer}/load/{number}": one
            for layer, share_E in zip(self.layers, share_LE, strict=False)
            for number, one in zip(held, share_E, strict=True)
        }

    def _load_of_all(self) -> Tensor:
        """Loads of the step, 0 for experts that this worker does not hold."""
        load_LE = torch.zeros_like(self.reported_LE)
        load_LE[:, self.held] = self.load_LE.to(load_LE)
        return load_LE

    def _shares(self) -> Tensor:
        """Shares of the choices; without layers at a coordinator, which computes no steps."""
        load_LE = self.load_LE.float()
        return load_LE / load_LE.sum(1, keepdim=True).clamp(min=1) if self.seen else load_LE[:0]

    def move(self) -> None:
        for router, movement_E in zip(self.routers, self._decided, strict=False):
            router.shift(movement_E)
        self._decided = []

    def state(self) -> list[Tensor]:
        return [*(router.bias_E for router in self.routers), *([self.reported_LE] if self.reports else [])]

    def take_movement(self) -> list[Tensor]:
        moved, self._moved = self._so_far(), []
        if self.reports:
            moved[-1] = moved[-1] / moved[-1].sum(1, keepdim=True).clamp(min=1)
        return moved

    def pending(self) -> list[Tensor]:
        return self._moved

    def load_pending(self, values: list[Tensor]) -> None:
        self._moved = values

    def _so_far(self) -> list[Tensor]:
        """Movement of the biases since the last report, and the loads if they are reported."""
        return self._moved or [torch.zeros_like(one) for one in self.state()]

    def share_movement(self, mean: Callable[[Tensor], Tensor]) -> None:
        self._moved = [mean(one) for one in self._so_far()]

    def apply_movement(self, movement: list[Tensor]) -> None:
        for router, movement_E in zip(self.routers, movement, strict=False):
            router.shift(movement_E)
        if self.reports:
            self.reported_LE.copy_(movement[-1].clamp(0, 1))


def block_parts(settings: schema.Moe, vocab_size: int, held: HeldExperts, variant: Variant, layer: int) -> tuple[BlockPart, BlockPart]:
    heads = settings.mixture_of_heads.enabled
    attention: BlockPart = MixtureOfHeads(settings, variant) if heads else Attention(settings, settings.attention_dropout, variant)
    if attends_to_context(settings, layer):
        attention = WithCrossAttention(attention, settings)
    dense = layer < settings.experts.dense_layers
    return attention, FeedForward(settings, variant) if dense else ExpertLayer(settings, vocab_size, held)


def players(model: schema.Moe, run: Run, shapes: DataShapes) -> dict[str, nn.Module]:
    network = Moe(model, vocab_size_for(model.vocab_size, shapes), run.engine.experts)
    network.loads.reports = run.reports_loads
    if network.memory is not None:
        network.memory.reports = run.shares_updates
    return {"model": network}
