"""A feed-forward of many experts, of which each token visits a few. The weights of all experts of a layer are one tensor.

Shapes: B batch, L tokens of a sequence, T tokens of the batch, D width, E experts, K experts a token, I inner width, S all routes (K · T),
R rows: visits of tokens to experts, sorted by expert.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shoal.config.schema import model as schema
from shoal.models.activations import ACTIVATIONS, blend
from shoal.models.cache import LayerCache
from shoal.models.routers import Held, Routes, router
from shoal.models.trunk import INITIAL_STD, BlockPart, Sight, Told


class Visits(NamedTuple):
    """Which token visits which expert, expert after expert."""

    tokens_R: Tensor
    """The row of each visit's token among all tokens."""
    places_R: Tensor
    """The place of each visit among all routes, [K, T] flattened."""
    sizes_E: Tensor
    """Visits to each expert."""
    dropped: Tensor
    """Routes of tokens that count for which an expert had no room."""


class Experts(BlockPart):
    """Router and experts. Overflow adds nothing to the stream; evaluation and generation drop nothing."""

    stacks = ("up", "down")
    """The parameters that hold a matrix for each expert: an optimizer that looks at matrices looks at each of them."""
    per_expert = (*stacks, "up_bias", "down_bias")
    """The parameters whose first dimension is the experts."""

    def __init__(self, settings: schema.Moe, vocab_size: int, held: Held = None) -> None:
        """`held`: the experts that are here; None: all of them."""
        super().__init__()
        experts = settings.experts
        self.dropout, self.count = settings.dropout, experts.count if held is None else len(held)
        self.capacity_factor, self.z_loss = experts.capacity_factor, experts.z_loss_weight > 0
        self.gated = settings.feed_forward == "swiglu"
        width, inner = settings.hidden_size, settings.intermediate_size or 4 * settings.hidden_size
        self.router = router(experts, width, vocab_size, held)
        self.up = nn.Parameter(torch.empty(self.count, 2 * inner if self.gated else inner, width))
        self.down = nn.Parameter(torch.empty(self.count, width, inner))
        self.up_bias = nn.Parameter(torch.zeros(self.count, self.up.shape[1])) if settings.bias else None
        self.down_bias = nn.Parameter(torch.zeros(self.count, width)) if settings.bias else None
        self.activation_gate = nn.Linear(width, len(ACTIVATIONS)) if settings.mixture_of_activations.enabled else None
        self.grouped_products: dict[str, Callable[[Tensor, Tensor, Tensor, Tensor | None], Tensor]]
        self.grouped_products = {"up": grouped_linear, "down": grouped_linear}
        """Who computes the experts' products: an engine may put emulated ones here."""
        self.initialise(INITIAL_STD)

    def initialise(self, std: float) -> None:
        self.router.initialise(std)
        nn.init.normal_(self.up, std=std)
        nn.init.normal_(self.down, std=std)

    def last_weights(self) -> list[Tensor]:
        return [self.down]

    def forward(self, x_BLD: Tensor, sight: Sight, cache: LayerCache | None = None) -> tuple[Tensor, Told]:
        x_TD, counted_T = x_BLD.flatten(0, 1), None if sight.counted_BL is None else sight.counted_BL.flatten()
        routes = self.router(x_TD, sight.input_ids_BL.flatten())
        visits = self.visits(routes, counted_T)
        y_RD = self.experts(x_TD[visits.tokens_R], visits.sizes_E)
        y_RD = y_RD * routes.gates_TK.t().flatten()[visits.places_R, None].to(y_RD.dtype)
        all_SD = y_RD.new_zeros(routes.experts_TK.numel(), y_RD.shape[1]).index_copy(0, visits.places_R, y_RD)
        y_BLD = all_SD.view(-1, *x_TD.shape).sum(0).view_as(x_BLD).to(x_BLD.dtype)
        return F.dropout(y_BLD, self.dropout, self.training), self.told(routes, visits, counted_T)

    # --- who visits whom ---------------------------------------------------------------------------

    @torch.no_grad()
    def visits(self, routes: Routes, counted_T: Tensor | None) -> Visits:
        """All first choices come before all second ones, and tokens that count before those that do not: the last ones find no room."""
        K, tokens = routes.experts_TK.shape[1], routes.experts_TK.shape[0]
        experts_S = routes.experts_TK.t().flatten()
        key_S = 2 * experts_S
        if counted_T is not None:
            key_S = key_S + (~counted_T).repeat(K)
        if routes.taken_TK is not None:
            key_S = key_S.masked_fill(~routes.taken_TK.t().flatten(), 2 * self.count)
        key_S, places_S = key_S.sort(stable=True)
        sizes_E = torch.bincount(key_S.div(2, rounding_mode="floor"), minlength=self.count + 1)[: self.count]
        dropped = torch.zeros((), device=key_S.device)
        if routes.taken_TK is not None:
            places_S, key_S = places_S[: int(sizes_E.sum())], key_S[: int(sizes_E.sum())]
        if self.training and self.capacity_factor is not None:
            room = math.ceil(self.capacity_factor * K * tokens / self.count)
            kept_S = self._ranks(key_S.div(2, rounding_mode="floor"), sizes_E) < room
            dropped = ((~kept_S) & (key_S % 2 == 0)).sum().float()
            places_S, sizes_E = places_S[kept_S], sizes_E.clamp(max=room)
        return Visits(places_S % tokens, places_S, sizes_E, dropped)

    def _ranks(self, experts_R: Tensor, sizes_E: Tensor) -> Tensor:
        """How many visits to the same expert come before each."""
        starts_E = sizes_E.cumsum(0) - sizes_E
        return torch.arange(len(experts_R), device=experts_R.device) - starts_E[experts_R]

    def told(self, routes: Routes, visits: Visits, counted_T: Tensor | None) -> Told:
        """Over the tokens that count: the loads of the experts before drops, the mean probabilities, and what becomes figures."""
        if counted_T is None:
            return {}
        K = routes.experts_TK.shape[1]
        chosen = routes.experts_TK[counted_T].flatten()
        tokens = counted_T.sum().clamp(min=1)
        told = {"load_E": torch.bincount(chosen, minlength=self.count).float(), "dropped": visits.dropped / (K * tokens)}
        if routes.probabilities_TE is not None:
            told["probability_E"] = (routes.probabilities_TE * counted_T[:, None]).sum(0) / tokens
            told["gate_entropy"] = _entropy(routes.probabilities_TE.detach(), counted_T) / tokens
        if routes.logits_TE is not None:
            logsumexp_T = routes.logits_TE.logsumexp(1) * counted_T
            told["logsumexp"] = logsumexp_T.detach().sum() / tokens
            if self.z_loss:
                told["z_loss"] = logsumexp_T.square().sum() / tokens
        return told

    # --- what the experts compute ------------------------------------------------------------------

    def experts(self, x_RD: Tensor, sizes_E: Tensor) -> Tensor:
        """Each row through its expert. Products are grouped; autocast does not reach them, so the types are chosen here."""
        kind = x_RD.device.type
        dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else self.up.dtype
        with torch.autocast(kind, enabled=False):
            inner_RI = self.grouped_products["up"](x_RD.to(dtype), self.up.to(dtype), sizes_E, self.up_bias)
            if self.gated:
                gate_RI, content_RI = inner_RI.chunk(2, dim=-1)
                inner_RI = self._activate(gate_RI, x_RD) * content_RI
            else:
                inner_RI = self._activate(inner_RI, x_RD)
            return self.grouped_products["down"](inner_RI, self.down.to(dtype), sizes_E, self.down_bias)

    def _activate(self, inner_RI: Tensor, x_RD: Tensor) -> Tensor:
        """The one activation, or a blend of several by a gate that sees the token."""
        if self.activation_gate is not None:
            gates_R4 = self.activation_gate(x_RD.to(self.activation_gate.weight.dtype)).float().softmax(-1)
            return blend(inner_RI, gates_R4)
        return F.silu(inner_RI) if self.gated else F.gelu(inner_RI, approximate="tanh")


def _entropy(scores_TE: Tensor, counted_T: Tensor) -> Tensor:
    """How undecided the router is about each token that counts, summed: 1 if all experts suit equally, 0 if one alone does."""
    share_TE = scores_TE / scores_TE.sum(1, keepdim=True).clamp(min=1e-20)
    entropy: Tensor = (torch.special.entr(share_TE).sum(1) * counted_T).sum() / math.log(max(2, scores_TE.shape[1]))
    return entropy


def grouped_linear(x_RD: Tensor, weight_END: Tensor, sizes_E: Tensor, bias_EN: Tensor | None = None) -> Tensor:
    """Rows, sorted by expert, times each expert's matrix: in one call where torch has one for this type and these sizes, else in a loop.

    On one CPU core the grouped call was 0.92 to 0.96 of the loop's time for large products, and half of it for two rows.
    """
    if _groupable(x_RD, weight_END):
        y_RN = F.grouped_mm(x_RD, weight_END.transpose(-2, -1), offs=sizes_E.cumsum(0).int())
    else:
        sizes = sizes_E.tolist()
        matrices, rows = weight_END.unbind(0), torch.split(x_RD, sizes)
        y_RN = torch.cat([F.linear(own, matrix) for own, matrix in zip(rows, matrices, strict=True)])
    if bias_EN is not None:
        y_RN = y_RN + bias_EN.to(y_RN.dtype).repeat_interleave(sizes_E, dim=0)
    return y_RN


def _groupable(x_RD: Tensor, weight_END: Tensor) -> bool:
    """Rows must begin at multiples of 16 bytes; in types other than these a GPU would loop anyway."""
    types = (torch.bfloat16,) if x_RD.is_cuda else (torch.float32, torch.bfloat16, torch.float16)
    sizes = (x_RD.shape[1], weight_END.shape[1])
    return x_RD.dtype in types and all(size * x_RD.element_size() % 16 == 0 for size in sizes) and x_RD.device.type in ("cpu", "cuda")
