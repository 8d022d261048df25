"""How tokens find their experts: one file a router."""

from shoal.models.routers.base import Router, Routes
from shoal.models.routers.build import router

__all__ = ["Router", "Routes", "router"]
