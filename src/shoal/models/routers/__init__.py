"""Routers, which choose the experts of each token: one file per router."""

from shoal.models.routers.base import HeldExperts, Router, Routes
from shoal.models.routers.build import build_router

__all__ = ["HeldExperts", "Router", "Routes", "build_router"]
