"""Matrix products in fp8: numbers of e4m3 with a scale for each row of both factors. The forward product and the gradient of the input are
taken so; the gradient of the weights is in bf16.

Real ones need a GPU of the Hopper generation (H100, H200). Elsewhere `emulation.py` rounds as `ScaleHistory` says and multiplies in fp32.

Shapes: R rows, I inputs, O outputs, E experts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache
from importlib.util import find_spec
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shoal.config.schema.training import Fp8, Training
from shoal.errors import ShoalError
from shoal.models.layers.expert_layer import per_row

LARGEST = 448.0
"""That e4m3 holds."""
_HOPPER = (9, 0)
"""What CUDA calls the generation of the H100 and the H200."""
_MOST_ERROR = 0.15
"""Of products in fp8 against exact ones; about 0.05 is usual."""
_MULTIPLE = 16
"""Of which the products want both sizes of a matrix."""


def is_real(device: torch.device) -> bool:
    """Whether this device multiplies such numbers by itself."""
    return device.type == "cuda" and find_spec("triton") is not None and torch.cuda.get_device_capability(device) == _HOPPER


def check(training: Training, device: torch.device) -> None:
    """Refuse to train in fp8 where there is none, unless emulation is allowed."""
    if training.precision.kind == "fp8" and not training.allow_emulation and not is_real(device):
        raise ShoalError(
            f"training.precision.kind: fp8 needs a GPU of the Hopper generation (H100, H200), and this run would train on {device.type}; "
            "--allow-emulation (training.allow_emulation: true) rounds as fp8 does and computes in fp32, slower than bf16; bf16 is fast "
            "on GPUs that have it"
        )


@cache
def check_kernels(device: torch.device) -> None:
    """Refuse a GPU on which the kernels compute something else: compilers of GPU code have mixed up bytes of 8-bit numbers before."""
    generator = torch.Generator(device=device).manual_seed(0)
    shapes = ((96, 64), (96,), (3, 6144, 64), (3, 64, 3072))  # an inner width for which a row's threads exchange numbers
    given = [torch.randn(shape, device=device, generator=generator).requires_grad_() for shape in shapes]
    sizes_E, slope = torch.tensor([40, 0, 56], device=device), torch.randn(96, 64, device=device, generator=generator)
    rows = ScaleHistory(Fp8(), device)
    with torch.enable_grad():
        halves = [one.to(torch.bfloat16) for one in (given[0], *given[2:])]
        found = experts(rows, "check", given[2], given[3])(halves[0], given[1], halves[1], halves[2], sizes_E)
        expected = _experts_plainly(given[0], given[1], given[2], given[3], [40, 0, 56])
        pairs = zip(torch.autograd.grad(found, given, slope.to(found)), torch.autograd.grad(expected, given, slope), strict=True)
        errors = [float((one.float() - other).detach().norm() / other.detach().norm()) for one, other in [(found, expected), *pairs]]
    if not all(error < _MOST_ERROR for error in errors):
        raise ShoalError(
            f"training.precision.kind: products in fp8 are wrong on this machine (errors of {', '.join(f'{one:.0%}' for one in errors)}), "
            "which is a bug of the compiler that Triton includes: take bf16, or another version of Triton"
        )


def _experts_plainly(x_RD: Tensor, gates_R: Tensor, up: Tensor, down: Tensor, sizes: list[int]) -> Tensor:
    parts = zip(torch.split(x_RD, sizes), torch.split(gates_R, sizes), up, down, strict=True)
    inner = ((F.linear(x, up).chunk(2, -1), gates, down) for x, gates, up, down in parts)
    return torch.cat([F.linear(F.silu(gate) * content * gates[:, None], down) for (gate, content), gates, down in inner])


class ScaleHistory:
    """Rounds factors to fp8. Scales of weights hold for `interval` steps and leave `margin` powers of two free."""

    def __init__(self, settings: Fp8, device: torch.device) -> None:
        self.head_room, self.interval = 2.0**settings.margin, settings.interval
        self.renews = torch.ones((), device=device)
        """Not 0 in steps that take new scales of weights. It is on the device, for steps that are recorded."""
        self.kept: dict[str, Tensor] = {}
        """The scales of weights, where they hold for several steps. 0: not known yet."""

    def begin_step(self, step: int) -> None:
        if self.interval > 1:
            self.renews.fill_(step % self.interval == 0)

    def keep(self, name: str, weight: Tensor) -> None:
        """Make room for the scales of a weight [..., O, I]."""
        if self.interval > 1:
            self.kept[name] = torch.zeros(weight.shape[:-1], device=self.renews.device)

    # --- in emulation ------------------------------------------------------------------------------

    def forward(self, x_RI: Tensor, weight_OI: Tensor, name: str) -> tuple[Tensor, Tensor]:
        scale_O = self._scale_of_weight(weight_OI, name)
        return self._rounded(x_RI.float()), codes_of(weight_OI.float(), scale_O).float() * scale_O[:, None]

    def input_gradient(self, slope_RO: Tensor, weight_OI: Tensor, name: str) -> tuple[Tensor, Tensor]:
        """The numbers of the forward product. Their scales belong to the outputs, over which this product sums up: they are multiplied into
        the slopes before these are rounded."""
        scale_O = self._scale_of_weight(weight_OI, name)
        return self._rounded(slope_RO.float() * scale_O), codes_of(weight_OI.float(), scale_O).float()

    def weight_gradient(self, slope_RO: Tensor, x_RI: Tensor, name: str) -> tuple[Tensor, Tensor]:
        return slope_RO.to(torch.bfloat16).float(), x_RI.to(torch.bfloat16).float()

    def _rounded(self, x: Tensor) -> Tensor:
        scale = self._scale(x)
        return codes_of(x, scale).float() * scale[:, None]

    def _scale(self, x: Tensor) -> Tensor:
        return x.float().abs().amax(1) * (self.head_room / LARGEST)

    def _scale_of_weight(self, weight_OI: Tensor, name: str) -> Tensor:
        """An expert's scales, `layer#3`, are a part of those of its layer."""
        scale_O, (layer, _, number) = self._scale(weight_OI), name.partition("#")
        if layer not in self.kept:
            return scale_O
        known_O = self.kept[layer][int(number)] if number else self.kept[layer]
        known_O.copy_(torch.where((self.renews != 0) | (known_O == 0), scale_O, known_O))
        return known_O

    # --- state -------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        return {"kept": dict(self.kept)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Scales that fit are taken over, others are taken anew with the next step."""
        for name, value in state.get("kept", {}).items():
            if name in self.kept and self.kept[name].shape == value.shape:
                self.kept[name].copy_(value)


def codes_of(x: Tensor, scale: Tensor) -> Tensor:
    """Rows as numbers of e4m3, in units of their scales."""
    inverse = torch.where(scale > 0, 1.0 / scale, 0.0)
    return (x * inverse[:, None]).clamp(-LARGEST, LARGEST).to(torch.float8_e4m3fn)


# --- real products -----------------------------------------------------------------------------------------


class _Product(torch.autograd.Function):
    """x @ weight.T; of experts for the rows of each. `weight` is here for its gradient alone."""

    @staticmethod
    def forward(
        ctx: Any, x_RI: Tensor, weight: Tensor, codes: Tensor, turned: Tensor, scales: Tensor,
        ends_E: Tensor | None, owners_R: Tensor | None, head_room: float,
    ) -> Tensor:  # fmt: skip
        from shoal.engines.precision import fp8_kernels as kernels

        ctx.save_for_backward(x_RI, turned, scales, ends_E, owners_R)
        ctx.head_room = head_room
        return kernels.product(*kernels.rows(x_RI, None, None, head_room), codes, scales, ends_E)

    @staticmethod
    def backward(ctx: Any, *slopes: Tensor) -> tuple[Tensor | None, ...]:
        from shoal.engines.precision import fp8_kernels as kernels

        x_RI, turned, scales, ends_E, owners_R = ctx.saved_tensors
        slope_RO = slopes[0].contiguous()
        for_x = kernels.product(*kernels.rows(slope_RO, scales, owners_R, ctx.head_room), turned, None, ends_E)
        for_weight = slope_RO.t() @ x_RI if ends_E is None else F.grouped_mm(slope_RO.t(), x_RI, offs=ends_E)
        return for_x, for_weight, None, None, None, None, None, None


class _Experts(torch.autograd.Function):
    """Two products of experts with SwiGLU and the gates between them. `up` and `down` are here for their gradients alone."""

    @staticmethod
    def forward(
        ctx: Any, x_RD: Tensor, gates_R: Tensor, up: Tensor, down: Tensor, up_codes: Tensor, up_turned: Tensor, up_scales: Tensor,
        down_codes: Tensor, down_turned: Tensor, down_scales: Tensor, ends_E: Tensor, owners_R: Tensor, head_room: float,
    ) -> Tensor:  # fmt: skip
        from shoal.engines.precision import fp8_kernels as kernels

        inner_RI = kernels.product(*kernels.rows(x_RD, None, None, head_room), up_codes, up_scales, ends_E)
        found_RI, codes, scales = kernels.swiglu(inner_RI, gates_R, ends_E[-1:], head_room)
        ctx.save_for_backward(x_RD, gates_R, inner_RI, found_RI, up_turned, up_scales, down_turned, down_scales, ends_E, owners_R)
        ctx.head_room = head_room
        return kernels.product(codes, scales, down_codes, down_scales, ends_E)

    @staticmethod
    def backward(ctx: Any, *slopes: Tensor) -> tuple[Tensor | None, ...]:
        from shoal.engines.precision import fp8_kernels as kernels

        x_RD, gates_R, inner_RI, found_RI, up_turned, up_scales, down_turned, down_scales, ends_E, owners_R = ctx.saved_tensors
        slope_RD, head_room = slopes[0].contiguous(), ctx.head_room
        for_found = kernels.product(*kernels.rows(slope_RD, down_scales, owners_R, head_room), down_turned, None, ends_E)
        for_inner, for_gates, codes, scales = kernels.swiglu_backward(
            inner_RI, gates_R, ends_E[-1:], for_found, up_scales, owners_R, head_room
        )
        for_x = kernels.product(codes, scales, up_turned, None, ends_E)
        for_up, for_down = F.grouped_mm(for_inner.t(), x_RD, offs=ends_E), F.grouped_mm(slope_RD.t(), found_RI, offs=ends_E)
        return for_x, for_gates, for_up, for_down, *[None] * 9


def product(rows: ScaleHistory, name: str, x_RI: Tensor, weight: Tensor, ends_E: Tensor | None) -> Tensor:
    """`x_RI` and `weight` in bf16; `ends_E`: the row behind the last one of each expert."""
    owners_R = None if ends_E is None else _owners(ends_E, len(x_RI))
    return _Product.apply(  # type: ignore[no-untyped-call]
        x_RI.contiguous(), weight, *_rounded(rows, name, weight), ends_E, owners_R, rows.head_room
    )


@torch.no_grad()
def _rounded(rows: ScaleHistory, name: str, weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The numbers of a weight, the same transposed, and its scales."""
    from shoal.engines.precision import fp8_kernels as kernels

    kept = rows.kept.get(name)
    codes, turned, scales = kernels.weight(weight, kept, None if kept is None else rows.renews, rows.head_room)
    if kept is not None:
        kept.copy_(scales)
    return codes, turned, scales


def _owners(ends_E: Tensor, count: int) -> Tensor:
    """The expert of each row; the last one for rows of no expert."""
    places_R = torch.arange(count, device=ends_E.device, dtype=ends_E.dtype)
    return torch.searchsorted(ends_E, places_R, right=True).clamp(max=len(ends_E) - 1).int()


class LowPrecisionLinear(nn.Linear):
    """A linear layer that takes the place of another. Its parameters are those of the other, by the same names."""

    def __init__(self, layer: nn.Linear, rounding: Any, name: str) -> None:
        nn.Module.__init__(self)
        self.in_features, self.out_features = layer.in_features, layer.out_features
        self.weight, self.bias = layer.weight, layer.bias
        self.rounding, self.name = rounding, name
        rounding.keep(name, self.weight)


class Fp8Linear(LowPrecisionLinear):
    """A linear layer that multiplies in fp8."""

    def __init__(self, layer: nn.Linear, rows: ScaleHistory, name: str) -> None:
        _check_sizes(layer.weight)
        super().__init__(layer, rows, name)

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast(x.device.type, enabled=False):
            flat = product(self.rounding, self.name, x.flatten(0, -2).to(torch.bfloat16), self.weight.to(torch.bfloat16), None)
            found = flat.view(*x.shape[:-1], self.out_features)
            return found if self.bias is None else found + self.bias.to(found.dtype)


def grouped(rows: ScaleHistory, name: str, weight_EOI: Tensor) -> Callable[[Tensor, Tensor, Tensor, Tensor | None], Tensor]:
    """The products of a layer's experts."""
    _check_sizes(weight_EOI)
    rows.keep(name, weight_EOI)

    def experts_product(x_RI: Tensor, weight_EOI: Tensor, sizes_E: Tensor, bias_EO: Tensor | None = None) -> Tensor:
        ends_E = sizes_E.cumsum(0).int()
        y_RO = product(rows, name, x_RI.to(torch.bfloat16), weight_EOI.to(torch.bfloat16), ends_E)
        return y_RO if bias_EO is None else y_RO + per_row(bias_EO, sizes_E, len(y_RO)).to(y_RO.dtype)

    return experts_product


def experts(rows: ScaleHistory, name: str, up_EOI: Tensor, down_EOI: Tensor) -> Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]:
    """All that a layer's experts compute, if they have SwiGLU and no biases."""
    for key, weight in (("up", up_EOI), ("down", down_EOI)):
        _check_sizes(weight)
        rows.keep(f"{name}.{key}", weight)

    def whole(x_RD: Tensor, gates_R: Tensor, up: Tensor, down: Tensor, sizes_E: Tensor) -> Tensor:
        ends_E = sizes_E.cumsum(0).int()
        factors = (*_rounded(rows, f"{name}.up", up), *_rounded(rows, f"{name}.down", down))
        given = (x_RD.contiguous(), gates_R.float().contiguous(), up, down)
        return _Experts.apply(*given, *factors, ends_E, _owners(ends_E, len(x_RD)), rows.head_room)  # type: ignore[no-untyped-call]

    return whole


def _check_sizes(weight: Tensor) -> None:
    if any(size % _MULTIPLE for size in weight.shape[-2:]):
        sizes = " × ".join(map(str, weight.shape[-2:]))
        raise ShoalError(
            f"training.precision.kind: fp8 multiplies matrices whose sizes are multiples of {_MULTIPLE}, and the model has one of {sizes}: "
            "change model.hidden_size or model.intermediate_size, or take bf16"
        )
