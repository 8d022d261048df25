"""Optional Python packages."""

from __future__ import annotations

import importlib
from typing import Any

from shoal.errors import ShoalError

INSTALL = {"PIL": "pip install pillow", "sklearn": "pip install scikit-learn"}


def import_optional(module: str, missing: str = "") -> Any:
    """Import a module. Raises ShoalError with the command that installs it, or with the message `missing`."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        package = module.split(".")[0]
        command = INSTALL.get(package, "pip install 'shoal[hf]'")
        raise ShoalError(missing or f"this data needs the Python package `{package}`: {command}") from error
