"""Rules for strategies, machines, tasks, transports and serving."""

from __future__ import annotations

import re
from typing import Any

from shoal.config.layers import Settings
from shoal.config.rules.rule import changed, rule
from shoal.config.schema.engine import Engine
from shoal.config.schema.serving import bytes_of
from shoal.config.schema.strategy import Strategy


@rule("cluster.num_workers", "cluster.workers")
def workers_counted(settings: Settings, number: int | None, workers: tuple[str, ...]) -> None:
    if number is not None and workers and number != len(workers):
        message = f"{number} workers are expected and {len(workers)} are listed"
        settings.report("workers", message, "cluster.num_workers", "cluster.workers", help="make them agree")


@rule("cluster.workers")
def workers_named_once(settings: Settings, workers: tuple[str, ...]) -> None:
    for name in sorted({name for name in workers if workers.count(name) > 1}):
        settings.report("workers", f"worker `{name}` is listed twice", "cluster.workers")


@rule("cluster.server", "cluster.workers", "cluster.hosts")
def hosts_are_known(settings: Settings, server: str | None, workers: tuple[str, ...], hosts: dict[str, Any]) -> None:
    known = ", ".join(f"`{name}`" for name in hosts) or "none"
    if server is not None and server not in hosts:
        message = f"the server `{server}` has no address: the hosts are {known}"
        settings.report("hosts", message, "cluster.server", *_first_host(settings), help=f"add `{server}` to the hosts")
    if server is not None and server in workers:
        settings.report("hosts", f"`{server}` is the server and a worker too", "cluster.workers", "cluster.server")
    missing = [name for name in workers if name not in hosts] if hosts else []
    if missing:
        names = ", ".join(f"`{name}`" for name in missing)
        message = f"no address for the worker{'s' * (len(missing) > 1)} {names}: the hosts are {known}"
        settings.report("hosts", message, "cluster.workers", *_first_host(settings))


def _first_host(settings: Settings) -> tuple[str, ...]:
    return next(((".".join(path),) for path in settings.history if path[:2] == ("cluster", "hosts")), ())


@rule("engine.kind", "strategy.kind")
def replicas_meet_at_the_end_of_a_round(settings: Settings, engine: str, strategy: str) -> None:
    """Between rounds each process has its own weights, which no other part may read or replace."""
    if engine != "collectives":
        return
    if strategy != "diloco":
        message = f"the processes of the engine collectives step by themselves between the rounds of diloco, and the strategy is {strategy}"
        settings.report("engine", message, "engine.kind", "strategy.kind", help="set strategy.kind to diloco, or engine.kind to ddp")
        return
    for path, only in (("strategy.fragments", 1), ("strategy.overlap_steps", 0)):
        if settings.get(path) != only:
            message = f"the engine collectives averages whole models between rounds: `{settings.spelling(path)}` would have to be {only}"
            settings.report("engine", message, path, "engine.kind", help="or choose another engine.kind")


@rule("data.source.serve", "transport.kind", "strategy.kind")
def images_are_served_by_a_database(settings: Settings, serve: bool, transport: str, strategy: str) -> None:
    if serve and changed(settings, "data.source.serve") and (transport != "postgres" or strategy != "workunits"):
        message = "images are served to workers that lack them by a class's database only (transport postgres, strategy workunits)"
        settings.report("cannot-serve", message, "data.source.serve", "transport.kind", "strategy.kind")


@rule("strategy.units_per_update", "cluster.num_workers")
def units_fit_the_class(settings: Settings, units: int, workers: int | None) -> None:
    """A third to a half of the workers is a good number: with more, some do several for each update; with fewer, most are late."""
    if workers is None or workers <= 5 * units <= 5 * workers:
        return
    best = f"{max(1, round(0.3 * workers))} to {max(1, round(0.5 * workers))}"
    message = f"an update waits for {units} unit{'s' * (units > 1)} of work, and there are {workers} workers: {best} would fit"
    settings.report("units", message, "strategy.units_per_update", "cluster.num_workers", severity="warning")


@rule("strategy.rounds", "strategy.inner_steps", "training.max_steps")
def rounds_make_the_steps(settings: Settings, rounds: int | None, inner: int, steps: int | None) -> None:
    if rounds is not None and steps is not None and rounds != -(-steps // inner):
        message = f"{rounds} rounds of {inner} steps are {rounds * inner} steps, and training.max_steps is {steps}"
        settings.report("rounds", message, "strategy.rounds", "training.max_steps", help="give one of the two")


@rule("strategy.fragments", "strategy.inner_steps")
def fragments_take_equal_turns(settings: Settings, fragments: int, inner: int) -> None:
    if inner % fragments:
        message = f"{inner} inner steps cannot be shared evenly by {fragments} fragments"
        settings.report("fragments", message, "strategy.fragments", "strategy.inner_steps")


@rule("strategy.overlap_steps", "strategy.inner_steps", "strategy.fragments")
def overlap_ends_within_the_round(settings: Settings, overlap: int, inner: int, fragments: int) -> None:
    if overlap and overlap >= inner // fragments:
        turn = inner // fragments
        message = f"an answer is waited for {overlap} steps after it was asked for, and the next is due after {turn}"
        advice = f"set strategy.overlap_steps to {turn - 1} at most"
        settings.report("overlap", message, "strategy.overlap_steps", "strategy.inner_steps", help=advice)


@rule("strategy.expert_weight_cap", "model.kind")
def only_a_mixture_has_experts_to_weigh(settings: Settings, cap: float | None, model: str) -> None:
    if cap is not None and model != "moe":
        message = f"a model of the kind {model} has no experts to weigh by their tokens"
        settings.report("experts", message, "strategy.expert_weight_cap", "model.kind", help="set strategy.expert_weight_cap to null")


@rule("strategy.quorum", "strategy.grace_s")
def grace_follows_a_quorum(settings: Settings, quorum: int | None, grace: float) -> None:
    if grace and quorum is None:
        settings.warn_no_effect("strategy.grace_s", "a round waits for all, since there is no quorum", help="set strategy.quorum")


@rule("strategy.late", "strategy.quorum", "strategy.outer.momentum")
def momentum_runs_away_from_late_ones(settings: Settings, late: str, quorum: int | None, momentum: float) -> None:
    """Momentum moves the weights on while older contributions are still under way."""
    if late == "weigh" and quorum == 1 and momentum > 0.5:
        message = f"every contribution is applied when it arrives, and an outer momentum of {momentum:g} overshoots with late ones"
        paths = ("strategy.outer.momentum", "strategy.quorum")
        settings.report("momentum", message, *paths, severity="warning", help="set strategy.outer.momentum to 0, or a larger quorum")


@rule("strategy.overlap_blend", "strategy.overlap_steps")
def blending_follows_an_overlap(settings: Settings, blend: float, overlap: int) -> None:
    if not overlap and changed(settings, "strategy.overlap_blend"):
        why = "a worker waits for the new weights, and takes them"
        settings.warn_no_effect("strategy.overlap_blend", why, help="set strategy.overlap_steps")


@rule("strategy.min_staleness", "strategy.max_staleness")
def staleness_bounds(settings: Settings, least: int | None, most: int) -> None:
    if least is not None and least > most:
        message = f"the least staleness bound, {least}, is above max_staleness, {most}"
        settings.report("staleness", message, "strategy.min_staleness", "strategy.max_staleness")


@rule("strategy.kind", "engine.kind")
def alone_or_together(settings: Settings, kind: str, engine: str) -> None:
    """A single-worker run does not use settings of a cluster, except for the stages of a pipeline."""
    if kind != "local":
        return
    meeting = () if engine == "pipeline" else ("transport", "cluster", "coordinator")
    for section in ("updates", *meeting):
        written = [path for path in map(".".join, settings.history) if path.startswith(f"{section}.") and changed(settings, path)]
        if written:
            help = "choose syncps, edp or async, or start with --workers N"
            settings.warn_no_effect(written[0], "strategy.kind is local, so one worker trains alone", help=help)


@rule("serving.weights", "model.kind")
def weights_can_be_packed(settings: Settings, weights: str, kind: str) -> None:
    if weights not in ("auto", "fp32") and kind not in ("gpt", "huggingface"):
        message = f"the weights of a model of kind {kind} are served as they are, not as {weights}"
        settings.report("weights", message, "serving.weights", "model.kind", help="set serving.weights to auto")


@rule("serving.proposed_tokens", "model.kind")
def proposals_can_be_removed(settings: Settings, tokens: int | None, kind: str) -> None:
    if tokens and kind not in ("gpt", "moe", "huggingface"):
        message = f"a model of kind {kind} cannot forget its last tokens, so none can be proposed and verified"
        settings.report("proposals", message, "serving.proposed_tokens", "model.kind", help="set serving.proposed_tokens to null or 0")


@rule("serving.proposed_tokens", "model.cross_attention.enabled", "model.retrieval.enabled", "model.episodic_memory.enabled")
def proposals_need_no_side_texts(settings: Settings, tokens: int | None, attends: bool, retrieves: bool, remembers: bool) -> None:
    parts = {"cross_attention": attends, "retrieval": retrieves, "episodic_memory": remembers}
    part = next((name for name, on in parts.items() if on), None)
    if tokens and part is not None:
        message = "a model that reads passages, a context or its memory verifies no proposed tokens"
        help = "set serving.proposed_tokens to null or 0"
        settings.report("proposals", message, "serving.proposed_tokens", f"model.{part}.enabled", help=help)


@rule("serving.allow_origins")
def origins_are_named(settings: Settings, origins: tuple[str, ...]) -> None:
    for origin in origins:
        if not re.fullmatch(r"https?://([a-z0-9.-]+|\[[0-9a-f:]+\])(:[0-9]{1,5})?", origin):
            message = f"`{origin[:100]}` is not the origin of a page"
            help = "write each origin as a browser does: scheme, host in small letters, port where it is not the usual one"
            settings.report("origin", message, "serving.allow_origins", help=help)


@rule("serving.memory")
def memory_is_a_size(settings: Settings, memory: str) -> None:
    try:
        bytes_of(memory)
    except ValueError as problem:
        settings.report("memory", str(problem), "serving.memory")


@rule("serving.memory", "serving.num_nodes")
def memory_is_of_one_machine(settings: Settings, memory: str, nodes: int | None) -> None:
    if memory != "auto" and nodes is not None and nodes > 1:
        message = "serving.memory bounds models that are whole on one machine; over several, each machine gives what it has free"
        settings.report("memory", message, "serving.memory", "serving.num_nodes", help="set serving.memory to auto")


@rule("serving.num_nodes", "cluster.workers")
def nodes_are_there(settings: Settings, nodes: int | None, workers: tuple[str, ...]) -> None:
    if nodes is not None and workers and nodes != len(workers) + 1:
        message = f"the layers go over {nodes} nodes, and the cluster has {len(workers) + 1} (the server and {len(workers)} workers)"
        settings.report("nodes", message, "serving.num_nodes", "cluster.workers")


@rule("serving.num_nodes", "model.num_layers")
def a_layer_for_each_node(settings: Settings, nodes: int | None, layers: int | None) -> None:
    if nodes is not None and layers is not None and nodes > layers:
        settings.report("nodes", f"{layers} layers do not go over {nodes} nodes", "serving.num_nodes", "model.num_layers")


@rule("scheduler.tasks")
def tasks_named_once(settings: Settings, tasks: tuple[Any, ...]) -> None:
    ids = [task.id for task in tasks]
    for name in sorted({name for name in ids if ids.count(name) > 1}):
        settings.report("tasks", f"task `{name}` stands twice", "scheduler.tasks")


@rule("scheduler.tasks", "scheduler.kind")
def tasks_are_given_out(settings: Settings, tasks: tuple[Any, ...], kind: str) -> None:
    if tasks and kind == "none":
        message = "tasks are listed, and no scheduler gives them out"
        settings.report("tasks", message, "scheduler.tasks", "scheduler.kind", help="set it to priority, capability or gale-shapley")


@rule("scheduler.tasks", "scheduler.kind", "strategy.kind")
def priority_goes_by_priority(settings: Settings, tasks: tuple[Any, ...], kind: str, strategy: str) -> None:
    if kind == "priority" and strategy != "local" and any(task.required_flops for task in tasks):
        message = "required_flops has no effect on which worker gets a task: the scheduler `priority` goes by priority and memory alone"
        help = "`capability` and `gale-shapley` compare how long workers would take"
        settings.report("no-effect", message, "scheduler.tasks", "scheduler.kind", severity="warning", help=help)


@rule("scheduler.tasks", "strategy.kind", "engine.layers")
def tasks_are_stages(settings: Settings, tasks: tuple[Any, ...], strategy: str, layers: tuple[int, ...]) -> None:
    """With the pipeline engine each task is a stage, and all stages together are one worker."""
    if not tasks:
        return
    whole, paths = sum(task.model_share for task in tasks), ("scheduler.tasks", "engine.kind")
    if strategy != "local":
        if any(task.model_share < 1 for task in tasks):
            message = f"shares of the model are stages on different machines, and with the strategy {strategy} each worker has all of them"
            settings.report("tasks", message, *paths, help="set strategy.kind to local, which has one model on all machines")
        return
    if empty := [task.id for task in tasks if task.model_share == 0]:
        settings.report("tasks", f"task `{empty[0]}` is a stage without any of the model", *paths, help="give it a share, or leave it out")
    if whole > 1.02:
        help = "give each task the share that its stage has; together they may have all of it"
        settings.report("tasks", f"the tasks are stages that have {whole:.0%} of the model", *paths, help=help)
    if layers:
        message = "the tasks' shares say how the model is cut, and so do the layers of each block"
        settings.report("tasks", message, "engine.layers", "scheduler.tasks", help="leave one of them out")
    if any(task.data_share is not None for task in tasks):
        message = "the tasks' shares of the data have no effect: all stages of a model go through all of it"
        settings.report("no-effect", message, *paths, severity="warning", help="leave them out")


@rule("scheduler.tasks")
def tasks_share_the_data(settings: Settings, tasks: tuple[Any, ...]) -> None:
    given = [task.data_share for task in tasks if task.data_share is not None]
    open_ones, whole = len(tasks) - len(given), sum(given)
    if whole > 1 + 1e-9 or (open_ones and whole > 1 - 1e-9):
        more = f", and {open_ones} without a share want some, too" if open_ones else ""
        message = f"the tasks ask for {whole:.0%} of the data{more}"
        settings.report("tasks", message, "scheduler.tasks", help="together they may have all of it")


@rule("scheduler.kind", "strategy.kind", "engine.kind", "scheduler.tasks")
def strategy_takes_tasks(settings: Settings, kind: str, strategy: str, engine: str, tasks: tuple[Any, ...]) -> None:
    stages = strategy == "local" and engine == "pipeline" and tasks
    if kind == "none" or stages or Strategy.kinds[strategy].takes_tasks:
        return
    able = ", ".join(name for name, found in Strategy.kinds.items() if found.takes_tasks)
    message = f"workers of the strategy {strategy} cannot be given tasks one after the other; those of {able} can"
    settings.report("scheduler", message, "scheduler.kind", "strategy.kind", help="set scheduler.kind to none")


@rule("scheduler.kind", "cluster.hosts")
def claims_are_for_a_scheduler(settings: Settings, kind: str, hosts: dict[str, Any]) -> None:
    for name, host in hosts.items() if kind == "none" else ():
        given = [claim for claim in ("memory_gb", "flops", "bandwidth_mbps") if getattr(host, claim) is not None]
        if given:
            path = f"cluster.hosts.{name}.{given[0]}"
            message = f"`{settings.spelling(path)}` is for a scheduler, and there is none"
            settings.report("no-effect", message, path, severity="warning", help="set scheduler.kind")
            return


@rule("transport.kind", "engine.kind", "strategy.kind")
def threads_have_no_engines_of_several(settings: Settings, transport: str, engine: str, strategy: str) -> None:
    if transport == "in-process" and Engine.kinds[engine].several_processes and strategy != "local":
        message = f"with transport in-process workers are threads of one process, and the engine {engine} is several processes"
        settings.report("engine", message, "engine.kind", "transport.kind", help="set engine.kind to single, or transport.kind to zmq")


@rule("strategy.kind", "data.streaming")
def units_are_pieces_of_data_with_an_end(settings: Settings, strategy: str, streams: bool) -> None:
    if strategy == "workunits" and streams:
        message = "work units are pieces of data that has an end, and a stream has none"
        settings.report("stream", message, "data.streaming", "strategy.kind", help="choose another strategy, or data.streaming: false")
