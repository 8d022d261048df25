"""An optimizer's state by the names of the parameters, so that any engine reads what any other wrote.

`shared` holds what is one number for the whole network (the count of steps), `moments` a tensor of the parameter's own shape or layout for
each name, `groups` the settings it was saved with.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from shoal.engines.optim.flat_adam import FlatAdam
from shoal.engines.optim.optimizers import CombinedOptimizer, matrices_of
from shoal.updates.layout import FlatNetwork

State = dict[str, Any]


def of_flat(optimizer: torch.optim.Optimizer, network: FlatNetwork) -> State:
    """The state of an optimizer that steps the vector, or the parameters one by one."""
    whole = _whole(optimizer, network)
    if whole is None:
        return of_parameters(optimizer, _named(network))
    state = optimizer.wide_state() if isinstance(optimizer, FlatAdam) else optimizer.state.get(whole, {})
    long = {key: dict(network.layout.views(value)) for key, value in state.items() if _is_long(value)}
    moments = {slot.name: {key: views[slot.name] for key, views in long.items()} for slot in network.layout.slots}
    return packed({key: value for key, value in state.items() if key not in long}, moments, optimizer)


def load_flat(optimizer: torch.optim.Optimizer, network: FlatNetwork, saved: Mapping[str, Any]) -> None:
    whole = _whole(optimizer, network)
    if whole is None:
        load_parameters(optimizer, _named(network), saved)
        return
    moments = saved["moments"]
    keys: list[str] = list(next(iter(moments.values()), {}))
    state = copied(saved["shared"])
    for key in keys:
        state[key] = torch.empty_like(network.vector)
        for name, view in network.layout.views(state[key]):
            view.copy_(moments[name][key])
    if isinstance(optimizer, FlatAdam):
        optimizer.load_wide_state(state)
    else:
        _load(optimizer, {whole: state} if state else {})


def of_parameters(optimizer: torch.optim.Optimizer, named: Mapping[str, Tensor]) -> State:
    """The state of an optimizer whose parameters have these names."""
    parts = optimizer.parts if isinstance(optimizer, CombinedOptimizer) else (optimizer,)
    known = {parameter: state for part in parts for parameter, state in part.state.items()}
    states = {name: known.get(parameter) or _stacked(known, parameter) for name, parameter in named.items()}
    moments = {name: {key: value for key, value in state.items() if _is_long(value)} for name, state in states.items()}
    shared = {key: value for state in states.values() for key, value in state.items() if not _is_long(value)}
    return packed(shared, moments, optimizer)


def load_parameters(optimizer: torch.optim.Optimizer, named: Mapping[str, Tensor], saved: Mapping[str, Any]) -> None:
    states = {
        one: copied(saved["shared"]) | own for name, whole in named.items() for one, own in _spread(whole, dict(saved["moments"][name]))
    }
    _load(optimizer, {parameter: state for parameter, state in states.items() if state})


def _stacked(known: Mapping[Tensor, State], stack: Tensor) -> State:
    """The state of a stack whose matrices are stepped one by one."""
    states = [known[matrix] for matrix in matrices_of(stack) if matrix in known]
    first = states[0] if states else {}
    return {key: torch.stack([state[key] for state in states]) if _is_long(value) else value for key, value in first.items()}


def _spread(parameter: Tensor, moments: State) -> Iterator[tuple[Tensor, State]]:
    """What each tensor that an optimizer steps gets of a parameter's state."""
    matrices = matrices_of(parameter)
    if not matrices:
        yield parameter, moments
    for number, matrix in enumerate(matrices):
        yield matrix, {key: value[number].clone() for key, value in moments.items()}


def _load(optimizer: torch.optim.Optimizer, states: dict[Tensor, State]) -> None:
    """Load states with torch's own method, which converts types and devices. The optimizer's settings stay as they are."""
    for part in optimizer.parts if isinstance(optimizer, CombinedOptimizer) else (optimizer,):
        order = [parameter for group in part.param_groups for parameter in group["params"]]
        groups = part.state_dict()["param_groups"]
        part.load_state_dict({"state": {i: states[one] for i, one in enumerate(order) if one in states}, "param_groups": groups})
    if isinstance(optimizer, CombinedOptimizer):
        optimizer.share_groups()


def packed(shared: State, moments: dict[str, State], optimizer: torch.optim.Optimizer) -> State:
    groups = [{key: value for key, value in group.items() if key != "params"} for group in optimizer.param_groups]
    return {"shared": shared, "moments": moments, "groups": groups}


def _whole(optimizer: torch.optim.Optimizer, network: FlatNetwork) -> Tensor | None:
    """The one parameter that is the whole vector, if the optimizer has that."""
    first: Tensor = optimizer.param_groups[0]["params"][0]
    return first if first.data_ptr() == network.vector.data_ptr() and first.shape == network.vector.shape else None


def _named(network: FlatNetwork) -> dict[str, Tensor]:
    return {slot.name: parameter for slot, parameter in zip(network.layout.slots, network.masters, strict=True)}


def copied(shared: Mapping[str, Any]) -> State:
    """Optimizers count in place, so each has numbers of its own."""
    return {key: value.clone() if isinstance(value, Tensor) else value for key, value in shared.items()}


def _is_long(value: Any) -> bool:
    return isinstance(value, Tensor) and value.dim() > 0
