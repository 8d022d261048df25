"""Rules for learning from preferences and rewards."""

from __future__ import annotations

from typing import Any

from shoal.config.layers import Settings
from shoal.config.rules.rule import rule
from shoal.config.schema.data import DataSource
from shoal.config.schema.engine import Engine
from shoal.config.schema.model import Model
from shoal.config.schema.rlhf import Rlhf, SumReward, TrainedReward
from shoal.config.schema.strategy import Strategy
from shoal.config.schema.task import TEXT, Task
from shoal.config.schema.updates import Updates


@rule("task", "strategy.kind", "model.episodic_memory.enabled", "rlhf.policy", "checkpoint.resume_from")
def memories_are_read_only_in_feedback(
    settings: Settings, task: Task | None, strategy: str, remembers: bool, policy: str | None, resumed: str | None
) -> None:
    """Learning from answers neither adds nor replays episodes: a memory stays as the policy's run left it."""
    if not remembers or task is None or task.needs not in ("pairs", "prompts"):
        return
    name = "model.episodic_memory.enabled"
    if Strategy.kinds[strategy].gives_answers:
        message = f"a worker of the strategy {strategy} is sent the weights that it answers with, and not the episodes of a memory"
        settings.report("not-built", message, name, "strategy.kind", help=f"set strategy.kind to local, or {name} to false")
    elif task.needs == "pairs" and policy is None and resumed is None:
        message = f"the task {task.kind} reads a memory and writes nothing into it, and a model that starts anew has an empty one"
        settings.report("no-effect", message, name, "task.kind", severity="warning", help="set rlhf.policy to a run that has episodes")


@rule("task", "model")
def task_fits_model(settings: Settings, task: Task | None, model: Model) -> None:
    """A model that learns one task also learns every other task with the same needs."""
    if task is None:
        settings.report("task", f"a model of kind {model.kind} does not say what it learns", "model.kind", help="set task")
    elif model.learns and task.kind not in model.learns and task.needs not in [Task.kinds[name].needs for name in model.learns]:
        able = sorted(name for name, kind in Model.kinds.items() if task.kind in kind.learns)
        advice = f"set model.kind to one that does, such as {', '.join(able)}, or load a file that says which model before this one"
        message = f"a model of kind {model.kind} does not learn {task.kind}"
        settings.report("task", message, "task.kind", "model.kind", help=advice if able else "")


@rule("task", "data.source")
def pairs_for_those_who_compare(settings: Settings, task: Task | None, source: DataSource | None) -> None:
    if task is not None and task.needs == "pairs" and source is not None and not source.has_pairs:
        message = f"the task {task.kind} learns from pairs of answers, and the data source {source.kind} has none"
        settings.report("task", message, "task.kind", "data.source.kind", help="set data.source to {kind: preferences, path: …}")


@rule("task", "engine.kind")
def whole_networks_compare(settings: Settings, task: Task | None, engine: str) -> None:
    if task is not None and task.needs in ("pairs", "prompts") and engine in ("pipeline", "collectives"):
        message = f"the task {task.kind} looks at whole answers in step, and the processes of the engine {engine} do not work so"
        settings.report("engine", message, "engine.kind", "task.kind", help="choose single, ddp, fsdp or deepspeed")


@rule("task", "engine.kind", "strategy.kind")
def rollouts_are_for_policies_alone(settings: Settings, task: Task | None, engine: str, strategy: str) -> None:
    if task is None or task.needs != "prompts":
        return
    if Engine.kinds[engine].several_processes and Strategy.kinds[strategy].gives_answers:
        message = f"a worker of the strategy {strategy} is one process that answers prompts, and engine.kind is {engine}"
        settings.report("strategy", message, "engine.kind", "strategy.kind", help="set engine.kind to single, and let more workers join")
    if strategy != "local" and not Strategy.kinds[strategy].gives_answers:
        message = f"the strategy {strategy} has no use for answers: its workers send what they learned"
        able = " or ".join(name for name, kind in Strategy.kinds.items() if kind.gives_answers)
        settings.report("strategy", message, "strategy.kind", "task.kind", help=f"set strategy.kind to {able}, or to local")


@rule("task", "strategy.kind", "transport.kind")
def answers_are_for_policies(settings: Settings, task: Task | None, strategy: str, transport: str) -> None:
    if not Strategy.kinds[strategy].gives_answers:
        return
    if task is not None and task.needs != "prompts":
        message = f"workers of the strategy {strategy} answer prompts, and the task {task.kind} has none"
        settings.report("strategy", message, "strategy.kind", "task.kind", help="set task to ppo, with a section rlhf")
    if transport == "postgres":
        message = f"a database leases units of data, and no prompts (strategy {strategy})"
        settings.report("strategy", message, "transport.kind", "strategy.kind", help="set transport.kind to zmq")


@rule("strategy.kind", "updates")
def answers_are_made_with_whole_weights(settings: Settings, strategy: str, updates: Updates) -> None:
    """Answers are not updates: codecs and rules do not apply, and compressed weights would give other answers."""
    if not Strategy.kinds[strategy].gives_answers:
        return
    given = {
        "updates.codec.kind": updates.codec.kind != "none",
        "updates.aggregation.kind": updates.aggregation.kind != "mean",
        "updates.privacy.enabled": updates.privacy.enabled,
        "updates.clip_norm": updates.clip_norm is not None,
        "updates.memory": bool(updates.memory),
        "updates.scorer.enabled": updates.scorer.enabled,
    }
    for path in (path for path, chosen in given.items() if chosen):
        message = f"workers of the strategy {strategy} send answers, and `{settings.spelling(path)}` is for updates of the weights"
        settings.report("strategy", message, path, "strategy.kind", help="leave it out")


@rule("rlhf", "strategy.prompts_per_unit")
def rollouts_are_whole_units(settings: Settings, rlhf: Rlhf | None, prompts: int | None) -> None:
    if rlhf is None or prompts is None:
        return
    answers = rlhf.group * prompts
    if rlhf.ppo.rollout_size % answers:
        names = ("rlhf.ppo.rollout_size", "strategy.prompts_per_unit")
        settings.report("rollouts", f"`{names[0]}` of {rlhf.ppo.rollout_size} is no multiple of the {answers} answers of a unit", *names)


@rule("task", "rlhf", "training.gradient_accumulation_steps")
def policies_have_settings(settings: Settings, task: Task | None, rlhf: Rlhf | None, pieces: int) -> None:
    if task is None or task.needs != "prompts":
        return
    if rlhf is None:
        settings.report("task", f"the task {task.kind} needs a section rlhf: it says what is rewarded", "task.kind")
        return
    answers, mini = rlhf.ppo.rollout_size, rlhf.ppo.mini_batch_size
    for whole, part, names in (
        (answers, mini, ("rlhf.ppo.rollout_size", "rlhf.ppo.mini_batch_size")),
        (mini // rlhf.row, pieces, ("rlhf.ppo.mini_batch_size", "training.gradient_accumulation_steps")),
        (mini, rlhf.row, ("rlhf.ppo.mini_batch_size", "rlhf.algorithm")),
        (answers, rlhf.group, ("rlhf.ppo.rollout_size", "rlhf.group_size")),
    ):
        if whole % part:
            settings.report("rollouts", f"`{names[0]}` of {whole} is no multiple of `{names[1]}`, {part}", *names)


@rule("rlhf")
def rewards_can_be_given(settings: Settings, rlhf: Rlhf | None) -> None:
    if rlhf is None:
        return
    rewards = rlhf.reward.each
    if any(reward.kind == "exact" for reward in rewards) and rlhf.prompts is None:
        message = "the reward exact needs prompts with their right answers, and there is no file of them"
        settings.report("reward", message, "rlhf.reward.kind", help="set rlhf.prompts")
    if any(isinstance(reward, TrainedReward) and reward.run is None and reward.preferences is None for reward in rewards):
        message = "a trained reward needs the run that trained it, or preferences to train it from"
        settings.report("reward", message, "rlhf.reward.kind", help="give it `run` or `preferences`")
    to_train = sum(isinstance(reward, TrainedReward) and reward.run is None for reward in rewards)
    if not isinstance(rlhf.reward, SumReward):
        return
    if any(isinstance(part.reward, SumReward) and part.reward.runs for part in rlhf.reward.parts):
        message = "a sum within a sum names no runs: the outer one names those of all parts, in their order"
        settings.report("reward", message, "rlhf.reward.parts", help="write them into rlhf.reward.runs")
    if rlhf.reward.runs and len(rlhf.reward.runs) != to_train:
        message = f"{len(rlhf.reward.runs)} runs are given for the {to_train} trained rewards of the sum that name none themselves"
        settings.report("reward", message, "rlhf.reward.runs")


@rule("task.label_smoothing")
def smoothing_keeps_the_better_answer(settings: Settings, smoothing: float) -> None:
    if smoothing >= 0.5:
        message = f"with a label smoothing of {smoothing:g} the rejected answer would be the better one"
        settings.report("task", message, "task.label_smoothing")


@rule("task", "training.batch_size")
def answers_are_paired_with_other_prompts(settings: Settings, task: Task | None, size: int | None) -> None:
    if task is not None and task.unpaired and size == 1:
        message = (
            "kto estimates how far the model has moved from prompts with the answers of other prompts of their batch, and it has one row"
        )
        settings.report("task", message, "training.batch_size", "task.loss", help="set training.batch_size to 2 or more")


@rule("task", "model.retrieval.enabled")
def other_answers_have_no_passages(settings: Settings, task: Task | None, retrieves: bool) -> None:
    if task is not None and task.unpaired and retrieves:
        message = "kto also reads prompts with the answers of other prompts, for which no passages are found"
        settings.report("model", message, "model.retrieval.enabled", "task.loss", help="choose another task.loss")


@rule("task", "updates.privacy.enabled", "updates.privacy.unit")
def samples_are_learned_apart(settings: Settings, task: Task | None, private: bool, unit: str) -> None:
    if task is not None and task.unpaired and private and unit == "sample":
        message = "the gradient of one sample is limited, and in kto it depends on the other samples of its batch"
        help = "set updates.privacy.unit to contribution, or choose another task.loss"
        settings.report("privacy", message, "updates.privacy.unit", "task.loss", help=help)


@rule("task.desirable_weight", "task.undesirable_weight", "task.loss")
def labels_have_a_weight(settings: Settings, desirable: float, undesirable: float, loss: str) -> None:
    if loss == "kto" and not desirable and not undesirable:
        settings.report("task", "with both weights 0 there is nothing to learn", "task.desirable_weight", "task.undesirable_weight")


@rule("task", "model.dropout")
def dropout_in_use(settings: Settings, task: Task | None, dropout: float) -> None:
    if dropout and task is not None and not task.drops:
        settings.warn_no_effect("model.dropout", f"the task {task.kind} is learned without dropout", "task.kind")


@rule("task", "training.penalties")
def penalties_in_use(settings: Settings, task: Task | None, penalties: Any) -> None:
    given = [name for name in ("repetition_weight", "immediate_repetition_weight", "eos_weight") if getattr(penalties, name)]
    if given and task is not None and task.needs not in TEXT:
        message = f"penalties are for language models, this is {task.kind}"
        settings.report("no-effect", message, f"training.penalties.{given[0]}", "task.kind")
    elif given and task is not None and task.needs != "tokens":
        message = f"penalties have no effect: the task {task.kind} has a loss of its own"
        settings.report("no-effect", message, f"training.penalties.{given[0]}", "task.kind", severity="warning")


@rule("task", "rlhf", "model.max_seq_len", "data.sequence_length", "data.batching")
def answers_fit_the_model(
    settings: Settings, task: Task | None, rlhf: Rlhf | None, longest: int, length: int | None, batching: str
) -> None:
    """Prompts of texts are as long as they may be; those of a file or of pairs may be shorter."""
    if rlhf is None or task is None or task.needs != "prompts":
        return
    of_texts = rlhf.prompts is None and batching == "packed" and settings.get("data.source.kind") != "preferences"
    prompt = min(rlhf.ppo.prompt_length, length or longest) if of_texts else 1
    if prompt + rlhf.ppo.response_length > longest:
        message = f"answers of {rlhf.ppo.response_length} tokens to prompts of {prompt} do not fit a model that takes {longest}"
        paths = ("rlhf.ppo.response_length", "rlhf.ppo.prompt_length", "model.max_seq_len")
        settings.report("rollouts", message, *paths, help="set shorter ones, or a larger model.max_seq_len")


@rule("task", "rlhf", "model.kind", "engine.kind")
def values_have_a_place(settings: Settings, task: Task | None, rlhf: Rlhf | None, model: str, engine: str) -> None:
    """The value function of ppo is a row on the policy, or a network of its own."""
    if rlhf is None or task is None or task.needs != "prompts" or rlhf.algorithm != "ppo":
        return
    if rlhf.value == "head" and model == "huggingface":
        message = "a value head is a row on the policy, and models of kind huggingface take none"
        settings.report("model", message, "rlhf.value", "model.kind", help="set rlhf.value to network")
    elif rlhf.value == "head" and engine == "deepspeed" and settings.get("engine.zero_stage") == 3:
        message = "ZeRO-3 gathers a network for its output, which has no value beside it"
        settings.report("engine", message, "rlhf.value", "engine.zero_stage", help="set rlhf.value to network")
    elif rlhf.value == "network" and engine == "deepspeed" and settings.get("engine.nvme_offload"):
        message = "one network can be on the disk, and the value network is a second"
        settings.report("engine", message, "engine.nvme_offload", "rlhf.value", help="set rlhf.algorithm to rloo or grpo")


@rule("strategy.kind", "model.experts.router")
def answers_bring_no_statistics(settings: Settings, strategy: str, router: str) -> None:
    if Strategy.kinds[strategy].gives_answers and router == "sigmoid-bias":
        message = f"the router {router} keeps the loads of its experts, and answers do not contain them (strategy {strategy})"
        settings.report(
            "strategy", message, "model.experts.router", "strategy.kind", help="choose another router, or set strategy.kind to local"
        )
