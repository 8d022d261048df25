"""Optimizers of torch.optim by name. One that works element by element steps a network's whole vector at once."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import nn

from shoal.config.schema.training import WHOLE_MATRICES, Optimizer, PlayerOptimizer, TorchOptimizer
from shoal.engines.optim.flat_adam import FlatAdam
from shoal.errors import ShoalError
from shoal.updates.layout import FlatNetwork

# These look at the shape of a parameter, so they get the parameters one by one.
SHAPED = WHOLE_MATRICES

# torch hides these from its compiler, and imports the compiler for that at the first call: seconds, for what no optimizer here needs.
for _method in (torch.optim.Optimizer.add_param_group, torch.optim.Optimizer.state_dict, torch.optim.Optimizer.load_state_dict):
    _hidden: Any = inspect.unwrap(_method)
    _hidden.__dynamo_disable = _hidden


def merged(settings: Optimizer, player: PlayerOptimizer | None) -> TorchOptimizer:
    """The settings of one network: its own where it has them. An optimizer of another kind replaces what is made of them."""
    if not isinstance(settings, TorchOptimizer):
        return TorchOptimizer()
    own = {name: getattr(player, name) for name in player.fields() if getattr(player, name) is not None} if player else {}
    return settings.replace(**own)


def build(settings: TorchOptimizer, network: FlatNetwork) -> torch.optim.Optimizer:
    """An optimizer for a network's vector, or for its parameters where their shapes matter."""
    if settings.name == "Muon":
        return _muon(settings, network)
    if settings.name in SHAPED:
        return make(settings, list(network.masters))
    keywords = arguments(settings)
    if FlatAdam.suits(settings.name, keywords, settings.moments, network.vector.device):
        return FlatAdam(network, settings.moments, decoupled=settings.name == "AdamW", **keywords)
    whole = nn.Parameter(network.vector)
    whole.grad = network.gradient
    return make(settings, [whole])


def make(settings: TorchOptimizer, parameters: list[torch.Tensor] | list[nn.Parameter]) -> torch.optim.Optimizer:
    return _make(settings.name, arguments(settings), list(parameters))


def step(optimizer: torch.optim.Optimizer) -> None:
    """One step, without what torch wraps around it for compiled ones: that would import the compiler, too."""
    if "step" in vars(optimizer):  # a scheduler of the user's program counts the steps
        optimizer.step()
        return
    with torch.no_grad():
        inspect.unwrap(type(optimizer).step)(optimizer)


def _make(name: str, keywords: dict[str, Any], parameters: list[torch.Tensor]) -> torch.optim.Optimizer:
    kind = getattr(torch.optim, name)
    accepted = inspect.signature(kind).parameters
    if "fused" in accepted and name in ("Adam", "AdamW", "SGD", "Adagrad"):
        keywords = {"fused": True} | keywords
    try:
        optimizer: torch.optim.Optimizer = kind(parameters, **keywords)
    except (TypeError, ValueError, RuntimeError) as error:
        raise ShoalError(f"training.optimizer.name: {name} refuses its settings: {error}") from None
    return optimizer


def arguments(settings: TorchOptimizer) -> dict[str, Any]:
    """The keywords for the optimizer. The configuration's rules have refused those that it does not take."""
    accepted = inspect.signature(getattr(torch.optim, settings.name)).parameters
    keywords: dict[str, Any] = {"lr": settings.learning_rate}
    given = {name: getattr(settings, name) for name in ("weight_decay", "eps", "momentum") if getattr(settings, name) is not None}
    if settings.beta1 is not None or settings.beta2 is not None:
        first, second = accepted["betas"].default if "betas" in accepted else (0.9, 0.999)
        given["betas"] = (first if settings.beta1 is None else settings.beta1, second if settings.beta2 is None else settings.beta2)
    return keywords | given | {name: tuple(value) if name == "betas" else value for name, value in settings.kwargs.items()}


def _muon(settings: TorchOptimizer, network: FlatNetwork) -> torch.optim.Optimizer:
    """Muon for the matrices of hidden layers; AdamW for tables of words, and for what is no matrix.

    Muon's steps are made as large as AdamW's, so that one learning rate suits both, unless `kwargs` says otherwise.
    """
    tables, stacks = tables_of(network.network), _stacks(network)
    pairs = list(zip(network.parameters, network.masters, strict=True))
    matrices = [master for parameter, master in pairs if parameter.ndim == 2 and id(parameter) not in tables]
    known = {id(one) for one in matrices} | stacks.keys()
    others = [master for master in network.masters if id(master) not in known]
    matrices += [matrix for stack in stacks.values() for matrix in stack]
    keywords = {"adjust_lr_fn": "match_rms_adamw"} | arguments(settings)
    rest = {"lr": settings.learning_rate} | ({} if settings.weight_decay is None else {"weight_decay": settings.weight_decay})
    made = [_make(name, own, list(part)) for name, own, part in (("Muon", keywords, matrices), ("AdamW", rest, others)) if part]
    return CombinedOptimizer(*made) if len(made) > 1 else made[0]


def _stacks(network: FlatNetwork) -> dict[int, list[nn.Parameter]]:
    """The parameters that are stacks of experts' matrices, and those matrices, which share the stack's and its gradient's memory."""
    names = stack_names(network.network)
    found: dict[int, list[nn.Parameter]] = {}
    for slot, slope, parameter in zip(network.layout.slots, network.slopes, network.masters, strict=True):
        if parameter.ndim == 3 and slot.name.rsplit(".", 1)[-1] in names:
            found[id(parameter)] = matrices_of(parameter, [nn.Parameter(matrix) for matrix in parameter.data])
            for matrix, own in zip(found[id(parameter)], slope, strict=True):
                matrix.grad = own
    return found


def stack_names(network: nn.Module) -> set[str]:
    """What parameters are called that hold a matrix for each expert."""
    return {name for module in network.modules() for name in getattr(module, "stacks", ())}


def matrices_of(stack: Any, made: list[nn.Parameter] | None = None) -> list[nn.Parameter]:
    """The matrices that an optimizer steps in a stack's place; none: it steps the stack itself. `made`: from now on these."""
    if made is not None:
        stack.matrices = made
    return getattr(stack, "matrices", [])


def tables_of(network: nn.Module) -> set[int]:
    """The parameters that have a row for each token: a batch changes few of the rows, and Muon's step direction does not suit them.

    A part of a network has a list of them as attribute `tables`, since it may have the output matrix without the embedding.
    """
    known: set[int] | None = getattr(network, "tables", None)
    if known is not None:
        return known
    tables = [module.weight for module in network.modules() if isinstance(module, nn.Embedding)]
    words = {len(table) for table in tables}
    last = [module.weight for module in [one for one in network.modules() if isinstance(one, nn.Linear)][-1:]]
    return {id(table) for table in [*tables, *(weight for weight in last if len(weight) in words)]}


class CombinedOptimizer(torch.optim.Optimizer):
    """Two optimizers that step as one."""

    def __init__(self, first: torch.optim.Optimizer, second: torch.optim.Optimizer) -> None:
        self.parts = (first, second)
        super().__init__([parameter for part in self.parts for group in part.param_groups for parameter in group["params"]], {})
        self.share_groups()

    def share_groups(self) -> None:
        """Show the groups of both optimizers, so that a learning rate is set in both. Call it again after one has loaded a state."""
        self.param_groups = [group for part in self.parts for group in part.param_groups]

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for part in self.parts:
            step(part)

    def state_dict(self) -> dict[str, Any]:
        return {"state": {}, "param_groups": [], "parts": [part.state_dict() for part in self.parts]}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        for part, state in zip(self.parts, state_dict["parts"], strict=True):
            part.load_state_dict(state)
        self.param_groups = [group for part in self.parts for group in part.param_groups]
