"""Reachability of the Hugging Face hub, and offline use of its libraries."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

from shoal.data.packages import import_optional

_LIBRARIES = ("datasets", "transformers", "huggingface_hub")


def hub_answers(timeout_s: float = 5.0) -> bool:
    """Whether the hub can be reached. Its libraries retry for half a minute before they fail."""
    hub, constants = import_optional("huggingface_hub"), import_optional("huggingface_hub.constants")
    if constants.HF_HUB_OFFLINE:
        return False
    try:
        hub.get_session().head(constants.ENDPOINT, timeout=timeout_s)
    except Exception:  # any error means that the hub cannot be reached
        return False
    return True


@contextmanager
def offline(enabled: bool = True) -> Iterator[None]:
    """Make the libraries use only their caches."""
    constants, config = import_optional("huggingface_hub.constants"), import_optional("datasets.config")
    before = constants.HF_HUB_OFFLINE, config.HF_HUB_OFFLINE
    try:
        if enabled:
            constants.HF_HUB_OFFLINE = config.HF_HUB_OFFLINE = True
        yield
    finally:
        constants.HF_HUB_OFFLINE, config.HF_HUB_OFFLINE = before


@contextmanager
def quiet() -> Iterator[None]:
    """Keep the libraries from printing bars and notices: Shoal itself reports what the user must know."""
    loggers = [logging.getLogger(name) for name in _LIBRARIES]
    levels = [logger.level for logger in loggers]
    try:
        for logger in loggers:
            logger.setLevel(logging.ERROR)
        yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)
