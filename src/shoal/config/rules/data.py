"""Rules for data: sources, streams, mixtures and contexts."""

from __future__ import annotations

from datetime import datetime
from typing import Any

from shoal.config.derived_values import USER_KINDS
from shoal.config.layers import Settings
from shoal.config.rules.rule import names_a_model, rule
from shoal.config.schema.data import DataSource, Mixture
from shoal.config.schema.task import TEXT, Task

WITHOUT_CONTEXT = ("builtin", "wikitext")
"""Text sources that have no contexts beside their texts."""


@rule("task", "data.source", "data.streaming")
def data_is_what_the_task_needs(settings: Settings, task: Task | None, source: DataSource | None, streams: bool) -> None:
    if task is None or source is None or source.kind in USER_KINDS or task.kind == "custom":
        return
    wanted = "text" if task.needs in TEXT else "images"
    if source.gives != wanted and names_a_model(settings):
        message = (
            f"the task {task.kind} learns from {wanted}, and the data source {getattr(source, 'name', source.kind)} gives {source.gives}"
        )
        settings.report("data", message, "data.source.kind", "task.kind", "model.kind", help="choose another data.source, or another model")
    elif streams and source.gives == "images":
        message = "images are not streamed: a data set with many is decoded while it is read anyway"
        settings.report("stream", message, "data.streaming", "data.source.kind", help="set it to false")


@rule("data.streaming", "data.tokenizer")
def an_alphabet_needs_the_whole_text(settings: Settings, streams: bool, tokenizer: str | None) -> None:
    if streams and tokenizer == "characters":
        message = "the tokenizer `characters` must see the whole text first, and a stream shows its beginning"
        settings.report("stream", message, "data.tokenizer", "data.streaming", help="choose bytes or bpe, or data.streaming: false")


@rule("data.chat_time")
def templates_read_a_time(settings: Settings, time: str | None) -> None:
    if time is not None:
        try:
            datetime.fromisoformat(time)
        except ValueError:
            settings.report("data", f"{time!r:.40} is no time", "data.chat_time", help="write it as 2026-11-19T10:00:00")


@rule("data.streaming", "training.max_steps", "task", "data.source")
def a_stream_ends_after_steps(settings: Settings, streams: bool, steps: int | None, task: Task | None, source: DataSource | None) -> None:
    """Pairs are read whole, and a rollout's length is that of its prompts."""
    if not streams or steps is not None or not names_a_model(settings) or source is None or source.has_pairs:
        return
    if task is not None and task.needs != "prompts":
        message = "the length of a stream is not known beforehand, and the learning rate follows a plan of the whole run"
        help = "set training.max_steps; a run ends with training.epochs if those are over sooner"
        settings.report("stream", message, "data.streaming", "training.max_steps", help=help)


@rule("data.streaming", "scheduler.kind", "strategy.kind")
def tasks_are_shares_of_data_with_an_end(settings: Settings, streams: bool, scheduler: str, strategy: str) -> None:
    if streams and scheduler != "none" and strategy != "local":
        message = "tasks are shares of data that has an end, and a stream has none"
        settings.report(
            "stream", message, "data.streaming", "scheduler.kind", help="set scheduler.kind to none, or data.streaming to false"
        )


@rule("data.source.parts", "data.mixing.enabled", "data.streaming")
def streams_are_drawn_by_weight(settings: Settings, parts: tuple[Any, ...], mixing: bool, streams: bool) -> None:
    if streams and mixing and parts and all(part.weight is None for part in parts):
        message = "the parts have no weights, and while they are streamed their sizes are not known"
        settings.report("mixture", message, "data.source.parts", "data.streaming", help="give every part a weight")


@rule("model.cross_attention.enabled", "model.retrieval.enabled", "data.source")
def there_is_a_context_to_attend_to(settings: Settings, attends: bool, retrieves: bool, source: DataSource | None) -> None:
    if not attends or retrieves or source is None:
        return
    sources = [part.source for part in source.parts] if isinstance(source, Mixture) else [source]
    if all(one.kind in WITHOUT_CONTEXT for one in sources):
        message = f"cross-attention has nothing to attend to: the texts of {source.kind} have no context, and model.retrieval is off"
        help = "choose data whose rows have a field `context` (data.source.context_field), or set model.retrieval.enabled"
        settings.report("model", message, "model.cross_attention.enabled", "data.source.kind", help=help)


@rule("data.source.parts", "data.mixing.enabled")
def mixture_can_be_drawn_from(settings: Settings, parts: tuple[Any, ...], mixing: bool) -> None:
    weighted = [part for part in parts if part.weight is not None]
    if not parts:
        settings.report("mixture", "a mixture needs at least one part", "data.source.parts")
    elif weighted and not mixing:
        message = "the parts have weights, and data.mixing is off: they would come one after the other"
        settings.report("mixture", message, "data.source.parts", "data.mixing.enabled", help="set data.mixing.enabled to true")
    elif weighted and len(weighted) < len(parts):
        settings.report("mixture", "some parts have a weight and some have none", "data.source.parts", help="give all of them one, or none")


@rule("model.cross_attention.enabled", "model.retrieval.enabled", "data.batching", "task")
def contexts_belong_to_one_text(settings: Settings, attends: bool, retrieves: bool, batching: str, task: Task | None) -> None:
    if attends and not retrieves and batching == "packed" and task is not None and task.needs == "tokens":
        message = "cross-attention reads one text's context at a time, and a packed sequence holds several texts"
        paths = ("data.batching", "model.cross_attention.enabled")
        settings.report("model", message, *paths, help="set data.batching to dynamic or padded, or set model.retrieval.enabled")


@rule("data.packing", "data.batching", "model.retrieval.enabled", "model.episodic_memory.enabled")
def side_texts_belong_to_a_row(settings: Settings, packing: str | None, batching: str, retrieves: bool, remembers: bool) -> None:
    if packing == "documents" and batching == "packed" and (retrieves or remembers):
        what, path = ("passages", "model.retrieval.enabled") if retrieves else ("episodes", "model.episodic_memory.enabled")
        message = f"the model reads {what} for a row as a whole, and a packed row holds several documents"
        settings.report("model", message, "data.packing", path, help="set data.packing to stream, or data.batching to dynamic")


@rule("data.source.context_field", "model.kind")
def contexts_are_attended_to(settings: Settings, field: str | None, model: str) -> None:
    if field is not None and not (model == "moe" and settings.get("model.cross_attention.enabled")):
        paths = ("data.source.context_field", "model.cross_attention.enabled", "model.kind")
        help = "set model.cross_attention.enabled, or leave it out"
        settings.report("model", "a text beside the input is read by cross-attention, and there is none", *paths, help=help)
