"""Training of a worker: batches, optimizer, schedule, precision, gradient checks."""

from collections.abc import Mapping
from typing import Any, Literal, Union

from shoal.config.fields import (
    EMPTY,
    Decay,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    PositiveShare,
    Section,
    Share,
)
from shoal.config.parts import Part

OptimizerName = Literal[
    "AdamW",
    "Adam",
    "SGD",
    "RMSprop",
    "Adagrad",
    "Adadelta",
    "Adafactor",
    "Adamax",
    "NAdam",
    "RAdam",
    "ASGD",
    "Rprop",
    "Muon",
]


KEYWORDS: Mapping[str, tuple[str, ...]] = {
    "AdamW": ("betas", "eps", "weight_decay", "amsgrad", "maximize", "foreach", "capturable", "differentiable", "fused"),
    "Adam": (
        *("betas", "eps", "weight_decay", "amsgrad", "foreach", "maximize", "capturable", "differentiable", "fused"),
        "decoupled_weight_decay",
    ),
    "SGD": ("momentum", "dampening", "weight_decay", "nesterov", "maximize", "foreach", "differentiable", "fused"),
    "RMSprop": ("alpha", "eps", "weight_decay", "momentum", "centered", "capturable", "foreach", "maximize", "differentiable"),
    "Adagrad": ("lr_decay", "weight_decay", "initial_accumulator_value", "eps", "foreach", "maximize", "differentiable", "fused"),
    "Adadelta": ("rho", "eps", "weight_decay", "foreach", "capturable", "maximize", "differentiable"),
    "Adafactor": ("beta2_decay", "eps", "d", "weight_decay", "foreach", "maximize"),
    "Adamax": ("betas", "eps", "weight_decay", "foreach", "maximize", "differentiable", "capturable"),
    "NAdam": (
        *("betas", "eps", "weight_decay", "momentum_decay", "decoupled_weight_decay"),
        *("foreach", "maximize", "capturable", "differentiable"),
    ),
    "RAdam": ("betas", "eps", "weight_decay", "decoupled_weight_decay", "foreach", "maximize", "capturable", "differentiable"),
    "ASGD": ("lambd", "alpha", "t0", "weight_decay", "foreach", "maximize", "differentiable", "capturable"),
    "Rprop": ("etas", "step_sizes", "capturable", "foreach", "maximize", "differentiable"),
    "Muon": ("weight_decay", "momentum", "nesterov", "ns_coefficients", "eps", "ns_steps", "adjust_lr_fn"),
}
"""Keyword arguments of each optimizer, without parameters and `lr`; a copy, since importing torch takes seconds."""

WHOLE_MATRICES = ("Muon", "Adafactor")
"""Optimizers that need whole matrices and cannot step shards of them."""


class Optimizer(Part, noun="optimizer"):
    """How a network's weights are stepped along its gradient. Built by a function of the settings and the network; it returns an optimizer
    of torch over all parameters that are trained. The rate of each group is multiplied by the course of `training.schedule`."""


class TorchOptimizer(Optimizer, built_by="shoal.engines.optim.optimizers:make"):
    """An optimizer of torch.optim. A setting that the optimizer does not take is refused."""

    kind: Literal["torch"] = "torch"
    name: OptimizerName = "AdamW"
    """Class name in torch.optim. Muon steps the matrices of hidden layers, at AdamW's scale; AdamW steps the rest."""
    learning_rate: NonNegativeFloat = 1e-3
    """Step size, before the schedule."""
    weight_decay: NonNegativeFloat | None = None
    """Weight decay; null: the optimizer's default (also for the settings below)."""
    beta1: Decay | None = None
    """Decay of the mean of gradients."""
    beta2: Decay | None = None
    """Decay of the mean of squared gradients."""
    eps: PositiveFloat | None = None
    """Added to the denominator."""
    momentum: Decay | None = None
    """Momentum of SGD and RMSprop."""
    moments: Literal["fp32", "bf16", "fp8"] = "fp32"
    """Type of the running means of Adam and AdamW: bf16 takes half of the memory, fp8 (8-bit floats with a scale per 2,048 numbers) a
    quarter. Both round stochastically, with the same random numbers when a step is repeated."""
    kwargs: Mapping[str, Any] = EMPTY
    """Further arguments, passed as they are."""


class FunctionOptimizer(Optimizer, built_by="shoal.runs.live_objects:optimizer_of"):
    """An optimizer that a Python function makes."""

    kind: Literal["function"] = "function"
    function: str
    """`module:function`, called with each network; it returns an optimizer of torch over the network's parameters."""


class PlayerOptimizer(Section):
    """Optimizer settings of one network of several; null: as in `optimizer`."""

    name: OptimizerName | None = None
    """Class name in torch.optim."""
    learning_rate: NonNegativeFloat | None = None
    """Step size, before the schedule."""
    weight_decay: NonNegativeFloat | None = None
    """Weight decay."""
    beta1: Decay | None = None
    """Decay of the mean of gradients."""
    beta2: Decay | None = None
    """Decay of the mean of squared gradients."""


class Schedule(Section):
    """The learning rate over the run."""

    kind: Literal["constant", "cosine", "cosine-restarts", "linear", "polynomial", "inverse-sqrt", "wsd"] = "constant"
    """Schedule after the warm-up. wsd (warm-up, stable, decay) keeps the full rate until its last `decay_steps`; inverse-sqrt falls with
    the square root of the step, and does not depend on the length of the run."""
    warmup_steps: NonNegativeInt = 0
    """Steps until the full learning rate."""
    warmup: Literal["linear", "cosine"] = "linear"
    """Shape of the rise."""
    end_learning_rate: NonNegativeFloat = 0.0
    """Where it ends; inverse-sqrt only approaches it."""
    power: PositiveFloat = 1.0
    """Exponent of the polynomial course."""
    cycles: PositiveInt = 2
    """How often cosine-restarts falls from the full rate."""
    decay_steps: PositiveInt | None = None
    """Steps of wsd's decay, the last of the run; null: a tenth of the run."""
    decay: Literal["linear", "1-sqrt", "cosine"] = "linear"
    """Shape of wsd's decay."""
    timescale: PositiveInt | None = None
    """Of inverse-sqrt: the rate is halved three times as many steps after the warm-up. null: warmup_steps, or 10,000 without a warm-up."""


class RateScheduler(Part, noun="learning-rate scheduler"):
    """What sets the learning rates, in place of `training.schedule`. Built by a function of the settings, the optimizer and the number of
    steps of the run; it returns a scheduler of torch.optim.lr_scheduler, which is stepped after each step of the optimizer."""


class FunctionScheduler(RateScheduler, built_by="shoal.runs.live_objects:scheduler_of"):
    """A scheduler that a Python function makes."""

    kind: Literal["function"] = "function"
    function: str
    """`module:function`, called with the optimizer; it returns a scheduler of torch.optim.lr_scheduler."""


class Ema(Section):
    """Exponential moving average of the weights, which is evaluated, exported and served in their place."""

    decay: Decay | None = None
    """Weight of the average before each step's weights are added, such as 0.999; null: no average is kept."""
    warmup: bool = True
    """Take a smaller decay at first, (1 + n) / (10 + n) after n steps, so that the first weights are soon forgotten."""


class Clipping(Section):
    """Limit on the norm of a step's gradient."""

    enabled: bool = True
    max_norm: PositiveFloat | None = None
    """Largest L2 norm of a network's gradient; null: no limit."""


class Fp32(Section):
    """32-bit floating point throughout."""

    kind: Literal["fp32"] = "fp32"


class Fp16(Section):
    """16-bit floating point with loss scaling."""

    kind: Literal["fp16"] = "fp16"


class Bf16(Section):
    """bfloat16 for activations and matrix products."""

    kind: Literal["bf16"] = "bf16"


class Fp8(Section):
    """8-bit floating point (e4m3, with a scale for each row) in the matrix products of the blocks and their input gradients; the rest is
    bf16. On GPUs of the Hopper generation (H100, H200); elsewhere see allow_emulation."""

    kind: Literal["fp8"] = "fp8"
    margin: NonNegativeInt = 0
    """Powers of two of headroom in each scale."""
    interval: PositiveInt = 1
    """Steps between new scales of weights."""


class Nvfp4(Section):
    """4-bit floating point with block scales in the matrix products of all blocks but the last (research); the rest is bf16. Emulated."""

    kind: Literal["nvfp4"] = "nvfp4"


Precision = Union[Fp32, Fp16, Bf16, Fp8, Nvfp4]
EMULATED = ("fp8", "nvfp4")
"""Precisions that are emulated on hardware without them; nvfp4 is always emulated."""


class Penalties(Section):
    """Additions to a language model's loss; a weight of 0 switches one off."""

    repetition_weight: NonNegativeFloat = 0.0
    """Unlikelihood of tokens that occur in the preceding window."""
    repetition_window: PositiveInt = 32
    """Length of that window, in tokens."""
    immediate_repetition_weight: NonNegativeFloat = 0.0
    """Penalty on the probability of repeating the previous token."""
    eos_weight: NonNegativeFloat = 0.0
    """Penalty on the probability of ending before min_sequence_length."""
    min_sequence_length: NonNegativeInt = 0
    """Length below which an end is penalised, in tokens."""


class EarlyStopping(Section):
    """Stop when evaluation no longer gets better."""

    patience: PositiveInt | None = None
    """Evaluations without progress before stopping; null: never."""
    threshold: NonNegativeFloat = 0.0
    """Improvement that counts as progress."""


class GradientHealth(Section):
    """Gradient checks: a clip value that decreases, explosions, non-finite steps."""

    enabled: bool = False
    initial_clip_value: PositiveFloat = 2.0
    """Limit on the gradient norm at the start. During the warm-up this schedule alone counts, not clipping.max_norm."""
    final_clip_value: PositiveFloat = 0.5
    """Limit on the gradient norm after the warm-up, if clipping.max_norm is not smaller."""
    warmup_steps: NonNegativeInt = 1000
    """Steps over which the clip value goes from initial to final."""
    explosion_threshold: PositiveFloat = 5.0
    """Gradient norm that counts as an explosion."""
    auto_reduce_lr: bool = False
    """Reduce the learning rate after an explosion."""
    lr_reduction_factor: PositiveShare = 0.5
    """Factor of that reduction."""


class Training(Section):
    """Training of each worker."""

    batch_size: PositiveInt | None = None
    """Samples per batch on each device; null: 32, or 16 for sequences longer than 128 tokens."""
    gradient_accumulation_steps: PositiveInt = 1
    """Batches whose gradients make one step. Without this setting, a single-worker run derives it from global_batch_size."""
    global_batch_size: PositiveInt | None = None
    """Samples per step over all devices; checked against batch_size × accumulation × devices. null: that product."""
    epochs: PositiveInt | None = None
    """Passes over the data; null: 30 for WikiText, 20 for SNLI, else 1, unless max_steps is set. A stream needs max_steps as well."""
    max_steps: PositiveInt | None = None
    """Last step of the run; null: the end of the epochs. In a later layer than `epochs` (on the command line, say) it replaces them;
    in the same layer the run ends with whichever is reached first. A step is an update of the weights; with diloco, a worker's step."""
    optimizer: Optimizer = TorchOptimizer()
    players: Mapping[str, PlayerOptimizer] = EMPTY
    """Optimizer settings by network: `generator`, `discriminator`, `policy`, `value`."""
    schedule: Schedule = Schedule()
    scheduler: RateScheduler | None = None
    """A scheduler of torch in place of `schedule`; null: none."""
    ema: Ema = Ema()
    clipping: Clipping = Clipping()
    polyak_alpha: Share | None = None
    """Weight of the server's parameters when a worker pulls: local ← α·server + (1−α)·local (strategy syncps). null: 1."""
    precision: Precision = Fp32()
    allow_emulation: bool = False
    """Emulate fp8 on hardware without it: numbers are rounded to fp8 and products computed in fp32, slower than bf16. nvfp4 is always
    emulated."""
    gradient_checkpointing: bool = False
    """Recompute activations in the backward pass to save memory."""
    compile: bool | Literal["auto"] = "auto"
    """Compile the model with torch.compile. auto: on a CUDA GPU, where one process or ddp trains a transformer for long enough to gain more
    than the minute that compiling takes; never with fsdp and deepspeed, which compile if this is true. The stages of a pipeline and weights
    under ZeRO 3 are not compiled."""
    cuda_graph: bool = False
    """Record each step as a CUDA graph and replay it: several times faster for small models, if batches have few shapes."""
    device: Literal["auto", "cpu", "cuda", "mps"] = "auto"
    """Where to compute; auto: cuda, else mps, else cpu."""
    penalties: Penalties = Penalties()
    early_stopping: EarlyStopping = EarlyStopping()
    gradient_health: GradientHealth = GradientHealth()
