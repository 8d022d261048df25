"""Matrix products in fp8: numbers of e4m3 with a scale for each row of both factors. The forward product and the gradient of the input are
taken so; the gradient of the weights is in bf16.

Real ones need a GPU of the Hopper generation (H100, H200). Elsewhere `emulation.py` rounds as `Rows` says and multiplies in fp32.

Shapes: R rows, I inputs, O outputs, E experts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib.util import find_spec
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shoal.config.schema.training import Fp8, Training
from shoal.errors import ShoalError
from shoal.models.experts import of_each_row

LARGEST = 448.0
"""That e4m3 holds."""
HOPPER = 9
"""What CUDA calls the generation of the H100 and the H200."""
_MULTIPLE = 16
"""Of which the products want both sizes of a matrix."""


def is_real(device: torch.device) -> bool:
    """Whether this device multiplies such numbers by itself."""
    return device.type == "cuda" and find_spec("triton") is not None and torch.cuda.get_device_capability(device) == (HOPPER, 0)


def check(training: Training, device: torch.device) -> None:
    """Refuse to train in fp8 where there is none, unless emulation is allowed."""
    if training.precision.kind == "fp8" and not training.allow_emulation and not is_real(device):
        raise ShoalError(
            f"training.precision.kind: fp8 needs a GPU of the Hopper generation (H100, H200), and this run would train on {device.type}; "
            "--allow-emulation (training.allow_emulation: true) rounds as fp8 does and computes in fp32, slower than bf16; bf16 is fast "
            "on GPUs that have it"
        )


class Rows:
    """How factors are rounded, and the scales of weights, which hold for `interval` steps. `margin` leaves so many powers of two free."""

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
        """Make room for the scales of a weight [..., O, I]: by rows, and by columns for the gradient of the input."""
        if self.interval > 1:
            self.kept[f"{name}.rows"] = torch.zeros(weight.shape[:-1], device=self.renews.device)
            self.kept[f"{name}.columns"] = torch.zeros((*weight.shape[:-2], weight.shape[-1]), device=self.renews.device)

    # --- in emulation ------------------------------------------------------------------------------

    def forward(self, x_RI: Tensor, weight_OI: Tensor, name: str) -> tuple[Tensor, Tensor]:
        return self._rounded(x_RI), self._rounded(weight_OI, f"{name}.rows")

    def input_gradient(self, slope_RO: Tensor, weight_OI: Tensor, name: str) -> tuple[Tensor, Tensor]:
        return self._rounded(slope_RO), self._rounded(weight_OI.T, f"{name}.columns").T

    def weight_gradient(self, slope_RO: Tensor, x_RI: Tensor, name: str) -> tuple[Tensor, Tensor]:
        return slope_RO.to(torch.bfloat16).float(), x_RI.to(torch.bfloat16).float()

    def _rounded(self, x: Tensor, name: str | None = None) -> Tensor:
        x = x.float()
        scale = x.abs().amax(1) * (self.head_room / LARGEST)
        if name is not None and self.interval > 1:
            place, index = self._place(name)
            known = self.kept[place][index]
            scale = torch.where((self.renews != 0) | (known == 0), scale, known)
            known.copy_(scale)
        return codes_of(x, scale).float() * scale[:, None]

    def _place(self, name: str) -> tuple[str, Any]:
        """Where a weight's scales are: an expert's, `layer#3.rows`, are a part of those of its layer."""
        layer, _, rest = name.partition("#")
        if not rest:
            return name, ...
        number, _, kind = rest.partition(".")
        return f"{layer}.{kind}", int(number)

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
        ctx: Any, x_RI: Tensor, weight: Tensor, codes: Tensor, scales: Tensor, back: Tensor, back_scales: Tensor,
        ends_E: Tensor | None, head_room: float,
    ) -> Tensor:  # fmt: skip
        from shoal.engines import fp8_kernels

        ctx.save_for_backward(x_RI, back, back_scales, ends_E)
        ctx.head_room = head_room
        y_RO: Tensor = fp8_kernels.product(*fp8_kernels.by_rows(x_RI, None, None, head_room), codes, scales, ends_E)
        return y_RO

    @staticmethod
    def backward(ctx: Any, *slopes: Tensor) -> tuple[Tensor | None, ...]:
        from shoal.engines import fp8_kernels

        x_RI, back, back_scales, ends_E = ctx.saved_tensors
        slope_RO = slopes[0].contiguous()
        for_x = fp8_kernels.product(*fp8_kernels.by_rows(slope_RO, None, None, ctx.head_room), back, back_scales, ends_E)
        for_weight = slope_RO.t() @ x_RI if ends_E is None else F.grouped_mm(slope_RO.t(), x_RI, offs=ends_E)
        return for_x, for_weight, None, None, None, None, None, None


def product(rows: Rows, name: str, x_RI: Tensor, weight: Tensor, ends_E: Tensor | None) -> Tensor:
    """`x_RI` and `weight` in bf16; `ends_E`: the row behind the last one of each expert."""
    from shoal.engines import fp8_kernels

    x_RI = x_RI.contiguous()
    codes, scales = _rounded(rows, f"{name}.rows", weight, fp8_kernels.by_rows)
    if torch.is_grad_enabled():
        back = _rounded(rows, f"{name}.columns", weight, fp8_kernels.by_columns)
        y_RO: Tensor = _Product.apply(x_RI, weight, codes, scales, *back, ends_E, rows.head_room)  # type: ignore[no-untyped-call]
    else:
        y_RO = fp8_kernels.product(*fp8_kernels.by_rows(x_RI, None, None, rows.head_room), codes, scales, ends_E)
    return y_RO


@torch.no_grad()
def _rounded(rows: Rows, name: str, weight: Tensor, kernel: Callable[..., tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    kept = rows.kept.get(name)
    codes, scales = kernel(weight, kept, None if kept is None else rows.renews, rows.head_room)
    if kept is not None:
        kept.copy_(scales)
    return codes, scales


class Fp8Linear(nn.Linear):
    """A linear layer that multiplies in fp8. Its parameters are those of the layer it stands for, by the same names."""

    def __init__(self, layer: nn.Linear, rows: Rows, name: str) -> None:
        nn.Module.__init__(self)
        self.in_features, self.out_features = layer.in_features, layer.out_features
        self.weight, self.bias = layer.weight, layer.bias
        self.rows, self.name = rows, name
        _check_sizes(self.weight)
        rows.keep(name, self.weight)

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast(x.device.type, enabled=False):
            flat = product(self.rows, self.name, x.flatten(0, -2).to(torch.bfloat16), self.weight.to(torch.bfloat16), None)
            found = flat.view(*x.shape[:-1], self.out_features)
            return found if self.bias is None else found + self.bias.to(found.dtype)


def grouped(rows: Rows, name: str, weight_EOI: Tensor) -> Callable[[Tensor, Tensor, Tensor, Tensor | None], Tensor]:
    """The products of a layer's experts."""
    _check_sizes(weight_EOI)
    rows.keep(name, weight_EOI)

    def experts_product(x_RI: Tensor, weight_EOI: Tensor, sizes_E: Tensor, bias_EO: Tensor | None = None) -> Tensor:
        ends_E = sizes_E.cumsum(0).int()
        y_RO = product(rows, name, x_RI.to(torch.bfloat16), weight_EOI.to(torch.bfloat16), ends_E)
        return y_RO if bias_EO is None else y_RO + of_each_row(bias_EO, sizes_E, len(y_RO)).to(y_RO.dtype)

    return experts_product


def _check_sizes(weight: Tensor) -> None:
    if any(size % _MULTIPLE for size in weight.shape[-2:]):
        sizes = " × ".join(map(str, weight.shape[-2:]))
        raise ShoalError(
            f"training.precision.kind: fp8 multiplies matrices whose sizes are multiples of {_MULTIPLE}, and the model has one of {sizes}: "
            "change model.hidden_size or model.intermediate_size, or take bf16"
        )
