"""How tokens find their experts: one file a router."""

from shoal.models.routers.base import Held, Router, Routes
from shoal.models.routers.build import router

__all__ = ["Held", "Router", "Routes", "router"]
