"""Matrix products in fp8 and nvfp4 on hardware that has none: both factors are rounded to what the format holds, and multiplied in fp32.

So the result is that of the real thing up to the order of its sums, and slower than bf16. The products of the blocks are rounded: not the
output matrix, no router, and under nvfp4 not the last blocks, as its authors found necessary. All the rest is bf16. Real products in fp8
(`fp8.py`) take the same places.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from shoal.config.schema.training import Fp8, Nvfp4, Training
from shoal.engines.blocks import blocks_of
from shoal.engines.precision import fp8, nvfp4
from shoal.engines.precision.fp8 import Fp8Linear, LowPrecisionLinear, ScaleHistory
from shoal.errors import ShoalError
from shoal.models.compile_rules import not_compiled
from shoal.models.layers.expert_layer import per_row

_LAST_SHARE = 0.15
"""Of the blocks, at the end, that nvfp4 leaves in bf16; one at least."""

GroupedProduct = Callable[[Tensor, Tensor, Tensor, Tensor | None], Tensor]
"""Rows sorted by expert, the experts' matrices, how many rows each has, and biases → each row times its expert's matrix."""


class BlockScaledFormat:
    """nvfp4: 16 × 16 blocks for weights, so that both passes see the same ones; gradients are rounded by chance; rows of the weight
    gradient's factors are mixed first."""

    def forward(self, x_NI: Tensor, weight_OI: Tensor, name: str) -> tuple[Tensor, Tensor]:
        return nvfp4.rounded(x_NI), nvfp4.rounded(weight_OI, square=True)

    def input_gradient(self, slope_NO: Tensor, weight_OI: Tensor, name: str) -> tuple[Tensor, Tensor]:
        return nvfp4.rounded(slope_NO, stochastic=True), nvfp4.rounded(weight_OI, square=True)

    def weight_gradient(self, slope_NO: Tensor, x_NI: Tensor, name: str) -> tuple[Tensor, Tensor]:
        slope_ON, x_IN = nvfp4.turned(slope_NO).T, nvfp4.turned(x_NI).T
        return nvfp4.rounded(slope_ON, stochastic=True).T, nvfp4.rounded(x_IN).T

    def keep(self, name: str, weight: Tensor) -> None:
        """It has no scales that outlast a step."""


NumberFormat = BlockScaledFormat | ScaleHistory
"""Rounds the factors of the three products of a layer: `forward` those of x @ weight.T, `input_gradient` those of slope @ weight,
`weight_gradient` those of slope.T @ x. `keep` is called once for every weight, in the beginning; `name` identifies the weight."""


class _RoundedProduct(torch.autograd.Function):
    """x @ weight.T with rounded factors, and slopes as if nothing had been rounded but their own products' factors."""

    @staticmethod
    def forward(ctx: Any, x_NI: Tensor, weight_OI: Tensor, rounding: NumberFormat, name: str) -> Tensor:
        ctx.save_for_backward(x_NI, weight_OI)
        ctx.rounding, ctx.name = rounding, name
        with torch.autocast(x_NI.device.type, enabled=False):
            x, weight = rounding.forward(x_NI, weight_OI, name)
            return (x @ weight.T).to(x_NI.dtype)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:
        (slope_NO,), (x_NI, weight_OI) = gradients, ctx.saved_tensors
        for_x = for_weight = None
        with torch.autocast(x_NI.device.type, enabled=False):
            if ctx.needs_input_grad[0]:
                slope, weight = ctx.rounding.input_gradient(slope_NO, weight_OI, ctx.name)
                for_x = (slope @ weight).to(x_NI.dtype)
            if ctx.needs_input_grad[1]:
                slope, x = ctx.rounding.weight_gradient(slope_NO, x_NI, ctx.name)
                for_weight = (slope.T @ x).to(weight_OI.dtype)
        return for_x, for_weight, None, None


@not_compiled
def rounded_product(x_NI: Tensor, weight_OI: Tensor, rounding: NumberFormat, name: str) -> Tensor:
    if not len(x_NI):  # an expert that no token was routed to
        return x_NI.new_zeros(0, len(weight_OI))
    return _RoundedProduct.apply(x_NI, weight_OI, rounding, name)  # type: ignore[no-untyped-call]


class EmulatedLinear(LowPrecisionLinear):
    """A linear layer whose products are rounded."""

    def forward(self, x: Tensor) -> Tensor:
        if torch.is_autocast_enabled(x.device.type):
            x = x.to(torch.get_autocast_dtype(x.device.type))
        flat: Tensor = rounded_product(x.flatten(0, -2), self.weight, self.rounding, self.name)
        product = flat.view(*x.shape[:-1], self.out_features)
        return product if self.bias is None else product + self.bias.to(product.dtype)


def grouped(rounding: NumberFormat, name: str, weight_END: Tensor) -> GroupedProduct:
    """The products of experts, each of which is a layer of its own."""
    rounding.keep(name, weight_END)

    def product(x_RD: Tensor, weight_END: Tensor, sizes_E: Tensor, bias_EN: Tensor | None = None) -> Tensor:
        sizes = sizes_E.tolist()
        rows = torch.split(x_RD[: sum(sizes)], sizes)
        own = [rounded_product(x, weight, rounding, f"{name}#{i}") for i, (x, weight) in enumerate(zip(rows, weight_END, strict=True))]
        together: Tensor = nn.functional.pad(torch.cat(own), (0, 0, 0, len(x_RD) - sum(sizes)))  # rows of no expert
        if bias_EN is not None:
            together = together + per_row(bias_EN, sizes_E, len(together)).to(together.dtype)
        return together

    return product


def lower(players: dict[str, nn.Module], settings: Training, device: torch.device) -> ScaleHistory | None:
    """Let the networks compute in fp8 or nvfp4. Returns what has a state: the scales of fp8.

    fp8 is real where the device supports it, and emulated where the settings allow that. Elsewhere the networks stay in bf16: workers were
    already refused by `fp8.check`, and a coordinator or an evaluation may run on a different machine than the workers.
    """
    precision = settings.precision
    if isinstance(precision, Nvfp4):
        for name, player in players.items():
            _exchange(name, player, BlockScaledFormat(), "nvfp4", real=False)
    if not isinstance(precision, Fp8) or not (fp8.is_real(device) or settings.allow_emulation):
        return None
    rows = ScaleHistory(precision, device)
    if fp8.is_real(device):
        fp8.check_kernels(device)
    for name, player in players.items():
        _exchange(name, player, rows, "fp8", fp8.is_real(device))
    return rows


def _exchange(name: str, player: nn.Module, rounding: Any, kind: str, real: bool) -> None:
    """Put other layers in the place of linear ones, and other products into layers of experts."""
    linear, products = (Fp8Linear, fp8.grouped) if real else (EmulatedLinear, grouped)
    blocks = blocks_of(player)
    kept = max(1, round(_LAST_SHARE * len(blocks))) if kind == "nvfp4" else 0
    rounded = blocks[: len(blocks) - kept]
    found = [layer for block in rounded for layer in _linear_layers(block)]
    if not found:
        why = f"its last block of {len(blocks)} stays in bf16" if blocks else "it has no blocks"
        raise ShoalError(f"training.precision.kind {kind}: the network `{name}` would have no product in {kind}, since {why}")
    for number, (parent, attribute, layer) in enumerate(found):
        setattr(parent, attribute, linear(layer, rounding, f"{name}.{number}"))
    experts: list[Any] = [module for block in rounded for module in block.modules() if hasattr(module, "grouped_products")]
    for number, module in enumerate(experts):
        if real and module.is_plain_swiglu:
            module.fused_swiglu = fp8.experts(rounding, f"{name}.experts.{number}", module.up, module.down)
        else:
            for key in module.stacks:
                module.grouped_products[key] = products(rounding, f"{name}.experts.{number}.{key}", getattr(module, key))


def _linear_layers(module: nn.Module) -> Iterator[tuple[nn.Module, str, nn.Linear]]:
    """Every linear layer below, with where it stands."""
    for name, child in list(module.named_children()):
        if type(child) is nn.Linear:
            yield module, name, child
        else:
            yield from _linear_layers(child)
