"""Routers, which choose the experts of each token."""

from __future__ import annotations

from shoal.config.schema import model as schema
from shoal.errors import ShoalError
from shoal.models.routers.base import HeldExperts, Router, Routes
from shoal.models.routers.hash import HashRouter
from shoal.models.routers.sigmoid_bias import SigmoidBiasRouter
from shoal.models.routers.softmax import GshardRouter, StochasticRouter, SwitchRouter

__all__ = ["HeldExperts", "Router", "Routes", "build_router"]

_LEARNED = {"switch": SwitchRouter, "gshard": GshardRouter, "stochastic": StochasticRouter, "sigmoid-bias": SigmoidBiasRouter}


def build_router(settings: schema.Experts, width: int, vocab_size: int, held: HeldExperts = None) -> Router:
    if settings.router == "hash":
        if held is not None:
            raise ShoalError(
                "engine.experts: the router hash sends tokens to all experts by a fixed table, so a worker must hold all of them"
            )
        return HashRouter(settings, vocab_size)
    return _LEARNED[settings.router](settings, width, held)
