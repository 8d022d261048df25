"""Mixture-of-experts feed-forward: each token is routed to a few experts. The weights of all experts of a layer are one tensor.

Shapes: B batch, L tokens of a sequence, T tokens of the batch, D width, E experts, K experts a token, I inner width, S all routes (K · T),
R rows: assignments of tokens to experts, sorted by expert.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shoal.config.schema import model as schema
from shoal.models.compile_rules import not_compiled
from shoal.models.generation.kv_cache import LayerCache
from shoal.models.gpt import FeedForward
from shoal.models.kernels import HAS_TRITON
from shoal.models.layers.mixture_of_activations import ACTIVATIONS, blend
from shoal.models.layers.rank_exchange import RankExchange, SentRows
from shoal.models.routers import HeldExperts, Routes, build_router
from shoal.models.transformer import INITIAL_STD, BlockPart, FullPrecisionLinear, LayerInputs, SideOutputs

_FEW_ROUTES = 4096
"""Up to this number sorting is fast anyway, and the kernel that torch.compile makes for it does not compile for bytes (torch 2.11)."""


class ExpertAssignment(NamedTuple):
    """Which token goes to which expert, sorted by expert.

    On a GPU reading the number of assignments would synchronise, so routes that are not taken are kept as rows of no expert at the end:
    grouped products skip them, and later operations zero them. On a CPU they are left out.
    """

    tokens_R: Tensor
    """The token of each assignment."""
    places_R: Tensor
    """The index of each assignment among all routes, [K, T] flattened."""
    rows_TK: Tensor
    """The row of each route, and whether the route is taken."""
    taken_TK: Tensor
    sizes_E: Tensor
    """Tokens of each expert."""
    dropped: Tensor
    """Number of routes dropped by the capacity limit, of tokens that count in the loss."""
    real_R1: Tensor | None
    """False for rows of no expert; None: there are none."""


class ExpertLayer(BlockPart):
    """Router and experts. In training, tokens over an expert's capacity are dropped; evaluation and generation drop nothing."""

    stacks = ("up", "down")
    """Parameters that stack one matrix per expert; an optimizer that works on matrices works on each of them."""
    per_expert = (*stacks, "up_bias", "down_bias")
    """Parameters whose first dimension is the experts."""

    def __init__(self, settings: schema.Moe, vocab_size: int, held: HeldExperts = None) -> None:
        super().__init__()
        experts = settings.experts
        self.dropout, self.count = settings.dropout, experts.count if held is None else len(held)
        self.capacity_factor, self.z_loss = experts.capacity_factor, experts.z_loss_weight > 0
        self.gated = settings.feed_forward == "swiglu"
        width, inner = settings.hidden_size, expert_size(settings)
        self.router = build_router(experts, width, vocab_size, held)
        self.up = nn.Parameter(torch.empty(self.count, 2 * inner if self.gated else inner, width))
        self.down = nn.Parameter(torch.empty(self.count, width, inner))
        self.up_bias = nn.Parameter(torch.zeros(self.count, self.up.shape[1])) if settings.bias else None
        self.down_bias = nn.Parameter(torch.zeros(self.count, width)) if settings.bias else None
        self.activation_gate = FullPrecisionLinear(width, len(ACTIVATIONS)) if settings.mixture_of_activations.enabled else None
        self.shared = FeedForward(settings.replace(intermediate_size=experts.shared_size, dropout=0.0)) if experts.shared_size else None
        """The expert that sees every token, and its gate."""
        self.shared_gate = FullPrecisionLinear(width, 1, bias=False) if self.shared is not None and experts.shared_gate else None
        self.grouped_products: dict[str, Callable[[Tensor, Tensor, Tensor, Tensor | None], Tensor]]
        self.grouped_products = {"up": grouped_linear, "down": grouped_linear}
        """The grouped matrix products; an engine may replace them."""
        self.is_plain_swiglu = self.gated and self.up_bias is None and self.activation_gate is None
        self.fused_swiglu: Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor] | None = None
        """Replacement for all of `experts` in the plain SwiGLU case, from rows, gates, weights and sizes; an engine may set it."""
        self.rank_exchange: RankExchange | None = None
        """Where ranks share the experts: each then has a part of the stacks; an engine sets it. `count` is the number of all experts."""
        self.initialise(INITIAL_STD)

    def initialise(self, std: float) -> None:
        self.router.initialise(std)
        nn.init.normal_(self.up, std=std)
        nn.init.normal_(self.down, std=std)

    def last_weights(self) -> list[Tensor]:
        return [self.down]

    def forward(self, x_BLD: Tensor, inputs: LayerInputs, cache: LayerCache | None = None) -> tuple[Tensor, SideOutputs]:
        x_TD, counted_T = x_BLD.flatten(0, 1), None if inputs.counted_BL is None else inputs.counted_BL.flatten()
        routes = self.router(x_TD, inputs.input_ids_BL.flatten())
        assignment = self.assign(routes, counted_T)
        x_RD, gates_R = self.group(x_TD, routes, assignment)
        sent = self._sent(x_RD, gates_R, assignment)
        shared_BLD = None if self.shared is None else self.shared_output(x_BLD, inputs)  # while rows travel to other ranks
        if sent is None:
            y_RD = self.experts(x_RD, gates_R, assignment.sizes_E, assignment.real_R1)
        else:
            y_RD = sent.send_back(self.experts(*sent.wait())).wait()
        y_BLD = self.combine(y_RD, assignment, x_BLD.shape).to(x_BLD.dtype)
        y_BLD = y_BLD if shared_BLD is None else y_BLD + shared_BLD
        return F.dropout(y_BLD, self.dropout, self.training), self.statistics(routes, assignment, counted_T)

    def group(self, x_TD: Tensor, routes: Routes, assignment: ExpertAssignment) -> tuple[Tensor, Tensor]:
        """The rows of the experts, sorted by expert, and their gates."""
        return exchange(x_TD, assignment, back=False), gather_gates(routes.gates_TK, assignment)

    def combine(self, y_RD: Tensor, assignment: ExpertAssignment, shape: torch.Size) -> Tensor:
        """The sum of each token's expert outputs, [B, L, D]. It is no view: `fully_shard` warns of those."""
        rows_BLK, taken_BLK = (one_TK.view(*shape[:2], -1) for one_TK in (assignment.rows_TK, assignment.taken_TK))
        return exchange(y_RD, assignment._replace(rows_TK=rows_BLK, taken_TK=taken_BLK), back=True)

    def _sent(self, x_RD: Tensor, gates_R: Tensor, assignment: ExpertAssignment) -> SentRows | None:
        """The rows, on their way to the ranks of their experts; None: this rank has all experts."""
        if self.rank_exchange is None:
            return None
        return self.rank_exchange.begin(x_RD.to(self._product_type(x_RD)), gates_R, assignment.sizes_E)

    def shared_output(self, x_BLD: Tensor, inputs: LayerInputs) -> Tensor:
        """The output of the shared expert, which needs no routes."""
        assert self.shared is not None
        y_BLD: Tensor = self.shared(x_BLD, inputs)[0]
        if self.shared_gate is None:
            return y_BLD.to(x_BLD.dtype)
        with torch.autocast(x_BLD.device.type, enabled=False):
            gate_BL1 = self.shared_gate(x_BLD.to(self.shared_gate.weight.dtype)).sigmoid()
        return (y_BLD * gate_BL1.to(y_BLD.dtype)).to(x_BLD.dtype)

    # --- routing -----------------------------------------------------------------------------------

    @torch.no_grad()
    def assign(self, routes: Routes, counted_T: Tensor | None) -> ExpertAssignment:
        """Assign tokens to experts. First choices come before second ones, and tokens that count in the loss before those that do not, so
        the capacity limit drops the others first."""
        tokens, K = routes.experts_TK.shape
        key_S = 2 * routes.experts_TK.t().flatten()
        if counted_T is not None:
            key_S = key_S + (~counted_T).repeat(K)
        if routes.taken_TK is not None:
            key_S = key_S.masked_fill(~routes.taken_TK.t().flatten(), 2 * self.count)
        if key_S.is_cuda and self.count < 100 and len(key_S) > _FEW_ROUTES:
            key_S = key_S.to(torch.uint8)  # sorted in one pass instead of eight
        key_S, places_S = key_S.sort(stable=True)
        bounds = torch.searchsorted(key_S, torch.arange(0, 2 * self.count + 1, 2, device=key_S.device).to(key_S.dtype))
        sizes_E, dropped = bounds.diff(), torch.zeros((), device=key_S.device)
        if self.training and self.capacity_factor is not None:
            capacity = math.ceil(self.capacity_factor * K * tokens / self.count)
            rank_S = torch.arange(len(key_S), device=key_S.device) - bounds[key_S.long().div(2, rounding_mode="floor")]
            kept_S = (rank_S < capacity) & (key_S < 2 * self.count)
            dropped = ((rank_S >= capacity) & (key_S < 2 * self.count) & (key_S % 2 == 0)).sum().float()
            sizes_E = sizes_E.clamp(max=capacity)
            row_S = torch.where(kept_S, kept_S.cumsum(0), sizes_E.sum() + (~kept_S).cumsum(0)) - 1
            places_S = torch.empty_like(places_S).scatter_(0, row_S, places_S)
        return self._assignment(places_S, sizes_E, dropped, tokens)

    def _assignment(self, places_S: Tensor, sizes_E: Tensor, dropped: Tensor, tokens: int) -> ExpertAssignment:
        rows_S = torch.empty_like(places_S).scatter_(0, places_S, torch.arange(len(places_S), device=places_S.device))
        taken_S = rows_S < sizes_E.sum()
        keeps_all = places_S.is_cuda and self.rank_exchange is None  # an exchange reads the number of rows in any case
        places_R = places_S if keeps_all else places_S[: int(sizes_E.sum())]
        rows_TK, taken_TK = (one.view(-1, tokens).t() for one in (rows_S.masked_fill(~taken_S, 0), taken_S))
        real_R1 = (torch.arange(len(places_R), device=places_R.device) < sizes_E.sum())[:, None] if keeps_all else None
        return ExpertAssignment(places_R % tokens, places_R, rows_TK, taken_TK, sizes_E, dropped, real_R1)

    def statistics(self, routes: Routes, assignment: ExpertAssignment, counted_T: Tensor | None) -> SideOutputs:
        """Over the tokens that count in the loss: expert loads before drops, mean router probabilities, z-loss and figures."""
        if counted_T is None:
            return {}
        K = routes.experts_TK.shape[1]
        chosen_TKE = routes.experts_TK.unsqueeze(-1) == torch.arange(self.count, device=counted_T.device)
        tokens = counted_T.sum().clamp(min=1)
        load_E = (chosen_TKE & counted_T[:, None, None]).sum((0, 1)).float()
        found = {"load_E": load_E, "dropped": assignment.dropped / (K * tokens)}
        if routes.probabilities_TE is not None:
            found["probability_E"] = (routes.probabilities_TE * counted_T[:, None]).sum(0) / tokens
            found["gate_entropy"] = _entropy(routes.probabilities_TE.detach(), counted_T) / tokens
        if routes.logits_TE is not None:
            logsumexp_T = routes.logits_TE.logsumexp(1) * counted_T
            found["logsumexp"] = logsumexp_T.detach().sum() / tokens
            if self.z_loss:
                found["z_loss"] = logsumexp_T.square().sum() / tokens
        return found

    # --- the experts -------------------------------------------------------------------------------

    def _product_type(self, x_RD: Tensor) -> torch.dtype:
        """The type of the experts' products. Autocast does not reach grouped products, so it is chosen here."""
        kind = x_RD.device.type
        return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else self.up.dtype

    def experts(self, x_RD: Tensor, gates_R: Tensor, sizes_E: Tensor, real_R1: Tensor | None = None) -> Tensor:
        """Each row through its expert, times its gate. The gate is multiplied into the input of the last product, in the pass that
        computes it. `sizes_E` and `real_R1` are those of an assignment."""
        dtype = self._product_type(x_RD)
        with torch.autocast(x_RD.device.type, enabled=False):
            if self.fused_swiglu is not None:
                return self.fused_swiglu(x_RD.to(dtype), gates_R, self.up.to(dtype), self.down.to(dtype), sizes_E)
            inner_RI = self.grouped_products["up"](x_RD.to(dtype), self.up.to(dtype), sizes_E, self.up_bias)
            inner_RI = self._activated(inner_RI, x_RD, gates_R, sizes_E, real_R1)
            y_RD = self.grouped_products["down"](inner_RI, self.down.to(dtype), sizes_E, None)
            if self.down_bias is not None:
                y_RD = y_RD + (gates_R[:, None] * per_row(self.down_bias, sizes_E, len(y_RD))).to(dtype)
            return y_RD

    def _activated(self, inner_RI: Tensor, x_RD: Tensor, gates_R: Tensor, sizes_E: Tensor, real_R1: Tensor | None) -> Tensor:
        """Input of the second product: activation times gate."""
        if inner_RI.is_cuda and HAS_TRITON and self.gated and self.activation_gate is None:
            from shoal.models.kernels.swiglu import swiglu

            return swiglu(inner_RI, gates_R, sizes_E.sum())
        inner_RI = _zeroed(inner_RI, real_R1)
        if self.gated:
            gate_RI, content_RI = inner_RI.chunk(2, dim=-1)
            inner_RI = self._activate(gate_RI, x_RD) * content_RI
        else:
            inner_RI = self._activate(inner_RI, x_RD)
        return _zeroed(inner_RI * gates_R[:, None].to(inner_RI.dtype), real_R1)

    def _activate(self, inner_RI: Tensor, x_RD: Tensor) -> Tensor:
        """The one activation, or a blend of several by a learned gate."""
        if self.activation_gate is not None:
            gates_R4 = self.activation_gate(x_RD.to(self.activation_gate.weight.dtype)).float().softmax(-1)
            return blend(inner_RI, gates_R4)
        return F.silu(inner_RI) if self.gated else F.gelu(inner_RI, approximate="tanh")


def expert_size(settings: schema.Moe) -> int:
    """The width of an expert."""
    return settings.experts.intermediate_size or settings.intermediate_size or 4 * settings.hidden_size


def _entropy(scores_TE: Tensor, counted_T: Tensor) -> Tensor:
    """Normalised entropy of the router, summed over the tokens that count: 1 per token if all experts are equally likely."""
    share_TE = scores_TE / scores_TE.sum(1, keepdim=True).clamp(min=1e-20)
    return (torch.special.entr(share_TE).sum(1) * counted_T).sum() / math.log(max(2, scores_TE.shape[1]))


class _Exchange(torch.autograd.Function):
    """Gather token rows into expert rows, or sum them back. Each is the backward pass of the other, and neither needs atomic additions;
    torch's own backward pass of an index does, so it sorts the index first."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, tokens_R: Tensor, rows_TK: Tensor, taken_TK: Tensor, real_R1: Tensor | None, back: bool) -> Tensor:
        ctx.save_for_backward(tokens_R, rows_TK, taken_TK, real_R1)
        ctx.back = back
        return _gathered(x, tokens_R, rows_TK, taken_TK, real_R1, back)

    @staticmethod
    def backward(ctx: Any, *slopes: Tensor) -> tuple[Tensor, None, None, None, None, None]:
        tokens_R, rows_TK, taken_TK, real_R1 = ctx.saved_tensors
        return _gathered(slopes[0], tokens_R, rows_TK, taken_TK, real_R1, not ctx.back), None, None, None, None, None


def _gathered(x: Tensor, tokens_R: Tensor, rows_TK: Tensor, taken_TK: Tensor, real_R1: Tensor | None, back: bool) -> Tensor:
    if not back:
        return _zeroed(x.flatten(0, -2)[tokens_R], real_R1)
    if not len(x):
        return x.new_zeros(*rows_TK.shape[:-1], x.shape[1])
    return torch.where(taken_TK.unsqueeze(-1), x[rows_TK], 0.0).sum(-2)


def _zeroed(x_RD: Tensor, real_R1: Tensor | None) -> Tensor:
    return x_RD if real_R1 is None else torch.where(real_R1, x_RD, 0.0)


def exchange(x: Tensor, assignment: ExpertAssignment, back: bool) -> Tensor:
    """The input rows of the experts from those of the tokens; `back`: the sum of each token's expert outputs."""
    index = (assignment.tokens_R, assignment.rows_TK, assignment.taken_TK, assignment.real_R1)
    return _Exchange.apply(x, *index, back)  # type: ignore[no-untyped-call]


class _Pick(torch.autograd.Function):
    """The gate of each row, from those of all routes."""

    @staticmethod
    def forward(ctx: Any, gates_TK: Tensor, places_R: Tensor, rows_TK: Tensor, taken_TK: Tensor) -> Tensor:
        ctx.save_for_backward(rows_TK, taken_TK)
        return gates_TK.t().flatten()[places_R]

    @staticmethod
    def backward(ctx: Any, *slopes: Tensor) -> tuple[Tensor, None, None, None]:
        rows_TK, taken_TK = ctx.saved_tensors
        return torch.where(taken_TK, slopes[0][rows_TK], 0.0) if len(slopes[0]) else slopes[0].new_zeros(rows_TK.shape), None, None, None


def gather_gates(gates_TK: Tensor, assignment: ExpertAssignment) -> Tensor:
    return _Pick.apply(gates_TK, assignment.places_R, assignment.rows_TK, assignment.taken_TK)  # type: ignore[no-untyped-call]


def per_row(values_EN: Tensor, sizes_E: Tensor, rows: int) -> Tensor:
    """For each row the value of its expert; arbitrary for rows of no expert."""
    experts_R = torch.searchsorted(sizes_E.cumsum(0), torch.arange(rows, device=sizes_E.device), right=True)
    return values_EN[experts_R.clamp(max=len(values_EN) - 1)]


def grouped_linear(x_RD: Tensor, weight_END: Tensor, sizes_E: Tensor, bias_EN: Tensor | None = None) -> Tensor:
    """Rows, sorted by expert, times their expert's matrix: one grouped call where torch supports the type and sizes, else a loop.

    On one CPU core the grouped call was 0.92 to 0.96 of the loop's time for large products, and half of it for two rows.
    """
    if _groupable(x_RD, weight_END):
        product = F.grouped_mm if x_RD.dtype == torch.bfloat16 else _uncompiled_grouped_mm
        y_RN = product(x_RD, weight_END.transpose(-2, -1), offs=sizes_E.cumsum(0).int())
    elif x_RD.is_cuda:
        y_RN = _padded_linear(x_RD, weight_END, sizes_E)
    else:
        sizes = sizes_E.tolist()
        matrices, rows = weight_END.unbind(0), torch.split(x_RD, sizes)
        y_RN = torch.cat([F.linear(own, matrix) for own, matrix in zip(rows, matrices, strict=True)])
    if bias_EN is not None:
        y_RN = y_RN + per_row(bias_EN, sizes_E, len(y_RN)).to(y_RN.dtype)
    return y_RN


@not_compiled
def _uncompiled_grouped_mm(x_RD: Tensor, weight_EDN: Tensor, *, offs: Tensor) -> Tensor:
    """torch computes the grouped product of other types than bfloat16, and its compiler does not know their shapes."""
    return F.grouped_mm(x_RD, weight_EDN, offs=offs)


def _padded_linear(x_RD: Tensor, weight_END: Tensor, sizes_E: Tensor) -> Tensor:
    """`grouped_linear` as one batched product padded to the fullest expert, for types without a grouped GPU kernel."""
    most, starts_E = max(1, int(sizes_E.max())), sizes_E.cumsum(0) - sizes_E
    row_R = torch.arange(len(x_RD), device=x_RD.device)
    index_EC = (starts_E[:, None] + row_R[:most]).clamp(max=len(x_RD) - 1)
    y_ECN = torch.bmm(x_RD[index_EC], weight_END.transpose(1, 2))
    expert_R = torch.searchsorted(sizes_E.cumsum(0), row_R, right=True).clamp(max=len(sizes_E) - 1)
    place_R = expert_R * most + (row_R - starts_E[expert_R]).clamp(max=most - 1)
    return y_ECN.flatten(0, 1)[place_R]


def products_are_grouped(layer: ExpertLayer, dtype: torch.dtype) -> bool:
    """Whether a GPU computes the products of all experts in this type in one call, which needs no number from it."""
    return all(_groupable(weight_END[0].to(dtype), weight_END) for weight_END in (layer.up, layer.down))


def _groupable(x_RD: Tensor, weight_END: Tensor) -> bool:
    """Whether torch has a grouped product: rows must begin at multiples of 16 bytes; in other types a GPU would loop anyway."""
    types = (torch.bfloat16,) if x_RD.is_cuda else (torch.float32, torch.bfloat16, torch.float16)
    sizes = (x_RD.shape[1], weight_END.shape[1])
    return x_RD.dtype in types and all(size * x_RD.element_size() % 16 == 0 for size in sizes) and x_RD.device.type in ("cpu", "cuda")
