"""Settings for a test, laid over each other."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from shoal.config.load import LoadedConfig, resolve_data


def loaded(settings: Mapping[str, Any]) -> LoadedConfig:
    found = resolve_data(settings, name="test", dialect="shoal", environ={})
    assert found.ok, found.problems
    return found


def merged(*layers: Mapping[str, Any]) -> dict[str, Any]:
    result: dict[str, Any] = {}
    for layer in layers:
        for key, value in layer.items():
            result[key] = merged(result.get(key, {}), value) if isinstance(value, Mapping) else value
    return result
