"""Rules for training, engines, metrics and the hub."""

from __future__ import annotations

import re
from typing import Any

from shoal.config.fields import Secret
from shoal.config.layers import Settings
from shoal.config.rules.own_layers import against_adapters
from shoal.config.rules.rule import CUT_INTO_STAGES, SHARDING, WITHOUT_BLOCKS, across, names_a_model, rule
from shoal.config.schema.engine import Engine
from shoal.config.schema.output import Checkpoint
from shoal.config.schema.task import Task
from shoal.config.schema.training import EMULATED, WHOLE_MATRICES


@rule("training.schedule.warmup_steps", "training.max_steps")
def warmup_inside_run(settings: Settings, warmup: int, steps: int | None) -> None:
    if steps is not None and warmup and warmup >= steps:
        paths = ("training.schedule.warmup_steps", "training.max_steps")
        message = f"a warm-up of {warmup} steps does not end within a run of {steps}: the learning rate never reaches its peak"
        settings.report("warm-up", message, *paths, severity=across(settings, *paths))


@rule("training.schedule.kind", "training.schedule.decay_steps", "training.schedule.warmup_steps", "training.max_steps")
def decay_inside_run(settings: Settings, kind: str, decay: int | None, warmup: int, steps: int | None) -> None:
    if kind == "wsd" and decay is not None and steps is not None and warmup < steps < warmup + decay:
        paths = ("training.schedule.decay_steps", "training.schedule.warmup_steps", "training.max_steps")
        message = (
            f"a warm-up of {warmup} steps and a decay of {decay} are more than the run's {steps}: the decay begins with the warm-up's end"
        )
        settings.report("schedule", message, *paths, severity=across(settings, *paths), help=f"set the decay to {steps - warmup} or less")


@rule("training.schedule.kind", "training.schedule.end_learning_rate", "training.optimizer.learning_rate")
def schedule_falls(settings: Settings, kind: str, end: float, start: float) -> None:
    if kind != "constant" and end > start:
        paths = ("training.schedule.end_learning_rate", "training.optimizer.learning_rate")
        message = f"the learning rate would rise from {start:g} to {end:g} over the run"
        end_rate, rate = map(settings.spelling, paths)
        help = f"set {end_rate} to less than {start:g}, or {rate} to more than {end:g}"
        settings.report("schedule", message, *paths, help=help, severity=across(settings, *paths))


@rule(
    "training.global_batch_size",
    "training.batch_size",
    "training.gradient_accumulation_steps",
    "launch.devices_per_node",
    "launch.nodes",
    "strategy.kind",
)
def batch_arithmetic(
    settings: Settings, whole: int | None, batch: int | None, accumulation: int, devices: int | None, nodes: int | None, kind: str
) -> None:
    if whole is None or batch is None:
        return
    started = settings.processes if kind == "local" and Engine.kinds[settings.get("engine.kind")].several_processes else None
    count = devices * (nodes or 1) if devices else started
    step = batch * accumulation * (count or 1)
    paths = ("training.global_batch_size", "training.batch_size", "training.gradient_accumulation_steps")
    if count and whole != step:
        message = f"a global batch of {whole} is not {batch} × {accumulation} × {count} devices = {step}"
        help = f"set the global batch size to {step}, or leave it out; {fitting(whole, batch, accumulation, count)}"
        settings.report("batch-arithmetic", message, *paths, "launch.devices_per_node", help=help)
    elif whole % step:
        message = f"a global batch of {whole} is no multiple of {batch} × {accumulation} = {step}"
        settings.report("batch-arithmetic", message, *paths, help=f"no number of devices fits; {fitting(whole, batch, accumulation, 1)}")


@rule("engine.kind", "launch.devices_per_node")
def several_devices_need_an_engine_of_several(settings: Settings, engine: str, devices: int | None) -> None:
    if engine == "single" and devices is not None and devices > 1:
        why = "the engine single computes on one device"
        settings.warn_no_effect("launch.devices_per_node", why, "engine.kind", help="set engine.kind to ddp, fsdp or deepspeed")


def fitting(whole: int, batch: int, accumulation: int, devices: int) -> str:
    """A hint with which devices and accumulation the global batch fits."""
    options = []
    if whole % (batch * accumulation) == 0:
        number = whole // (batch * accumulation)
        options.append(f"{number} device{'s' if number > 1 else ''} (launch.devices_per_node)")
    if whole % (batch * devices) == 0:
        options.append(f"training.gradient_accumulation_steps {whole // (batch * devices)} on {devices} device{'s' if devices > 1 else ''}")
    return (
        f"{whole} fits {' or '.join(options)}"
        if options
        else f"{whole} is no multiple of {batch} × {devices}, so no accumulation fits either"
    )


@rule("training.gradient_health.enabled", "training.gradient_health.initial_clip_value", "training.gradient_health.final_clip_value")
def clip_value_tightens(settings: Settings, enabled: bool, initial: float, final: float) -> None:
    if enabled and final > initial:
        paths = ("training.gradient_health.final_clip_value", "training.gradient_health.initial_clip_value")
        message = f"the clip value would loosen from {initial:g} to {final:g}"
        settings.report("gradient-health", message, *paths, severity=across(settings, *paths))


@rule("training.precision.kind", "training.allow_emulation", "training.device")
def emulation_is_labelled(settings: Settings, kind: str, allowed: bool, device: str) -> None:
    if kind == "nvfp4" or (kind == "fp8" and allowed):
        where = ", unless a GPU has it (H100, H200)" if kind == "fp8" else ""
        message = f"{kind} is emulated{where}: what is learned is as with real {kind}, how long it takes is not"
        settings.report("emulated", message, "training.precision.kind", severity="warning")
    if kind == "fp8" and not allowed and device in ("cpu", "mps"):
        message = f"fp8 needs a GPU of the Hopper generation (H100, H200), and this run would train on {device}"
        help = "--allow-emulation (training.allow_emulation: true) rounds as fp8 does and computes in fp32, slower than bf16"
        settings.report("needs-gpu", message, "training.precision.kind", "training.device", help=help)
    elif kind == "fp8" and not allowed:
        message = "fp8 needs a GPU of the Hopper generation (H100, H200) wherever this run trains"
        help = "--allow-emulation (training.allow_emulation: true) computes it anywhere, slower than bf16"
        settings.report("needs-gpu", message, "training.precision.kind", severity="warning", help=help)


@rule("training.polyak_alpha", "strategy.kind")
def polyak_in_use(settings: Settings, alpha: float | None, kind: str) -> None:
    if alpha is not None and kind != "syncps":
        why = "one worker alone pulls nothing" if kind == "local" else f"with {kind} a pull replaces the weights"
        settings.warn_no_effect("training.polyak_alpha", why)


@rule("engine.zero_stage", "engine.nvme_offload", "engine.cpu_offload")
def offload_fits_stage(settings: Settings, stage: int, nvme: bool, cpu: bool) -> None:
    if nvme and stage < 3:
        settings.report("offload", f"offload to NVMe needs ZeRO stage 3, this is stage {stage}", "engine.nvme_offload", "engine.zero_stage")
    if nvme and cpu:
        settings.report("offload", "offload to CPU memory and to NVMe exclude each other", "engine.nvme_offload", "engine.cpu_offload")


_NAME = r"(?!.*(?:--|\.\.))[A-Za-z0-9_](?:[A-Za-z0-9_.-]{0,94}[A-Za-z0-9_])?"
_REPOSITORY = re.compile(f"{_NAME}/{_NAME}")


@rule("hub.enabled", "hub.repo_id", "hub.token")
def hub_has_a_place(settings: Settings, enabled: bool, repo_id: str, token: Secret | None) -> None:
    if enabled and not (_REPOSITORY.fullmatch(repo_id) and not repo_id.endswith(".git")):
        message = f"uploads are on, and `{repo_id}` is not a repository" if repo_id else "uploads are on, and no repository is named"
        settings.report("hub", message, "hub.repo_id", "hub.enabled", help="name it as user/name, of letters, digits, `-`, `_` and `.`")
    if enabled and not (token and token.reveal()):
        message = "uploads are on, and there is no token"
        settings.report("hub", message, "hub.enabled", help="export HF_TOKEN=hf_… before the run")


@rule("training.early_stopping.patience", "evaluation.strategy", "evaluation.batches")
def stopping_needs_evaluation(settings: Settings, patience: int | None, strategy: str | None, batches: int | None) -> None:
    if patience is not None and (strategy == "never" or batches == 0):
        path = "evaluation.strategy" if strategy == "never" else "evaluation.batches"
        settings.report("early-stopping", "early stopping needs evaluations, and there are none", "training.early_stopping.patience", path)


@rule("checkpoint.best", "evaluation.strategy", "evaluation.batches")
def best_weights_need_evaluation(settings: Settings, best: str | None, strategy: str | None, batches: int | None) -> None:
    if best is not None and (strategy == "never" or batches == 0):
        path = "evaluation.strategy" if strategy == "never" else "evaluation.batches"
        message = f"the best weights are those of the evaluation with the best {best}, and there are no evaluations"
        settings.report("best", message, "checkpoint.best", path)


@rule("checkpoint", "task")
def best_metric_is_known(settings: Settings, checkpoint: Checkpoint, task: Task | None) -> None:
    """A program may pass further metrics (`metrics=`), so an unknown name is an error only when the run starts."""
    if checkpoint.best is None:
        return
    name, higher = checkpoint.best_metric
    if higher is None:
        message = f"the name `{name}` does not say whether a higher or a lower value is better"
        settings.report("best", message, "checkpoint.best", help=f"write `max {name}` or `min {name}`")
    elif task is not None and task.measures and name not in task.measures:
        message = f"the task {task.kind} measures {', '.join(task.measures)}; `{name}` is known only if a program passes it (metrics=)"
        settings.report("best", message, "checkpoint.best", severity="warning", help="name one of these")


@rule("training.penalties.eos_weight", "training.penalties.min_sequence_length")
def early_ends_are_defined(settings: Settings, weight: float, length: int) -> None:
    if weight and not length:
        message = "an early end is penalised, and no length is early: min_sequence_length is 0"
        settings.report("no-effect", message, "training.penalties.eos_weight", "training.penalties.min_sequence_length")


@rule("name")
def a_name_is_part_of_a_folders_name(settings: Settings, name: str | None) -> None:
    if name and (set(name) & set("/\\") or name in (".", "..")):
        message = f"`{name}` is to be a part of a folder's name, so it has no / or \\"
        settings.report("name", message, "name", help="output_dir says where runs are kept")


@rule("logging.project", "output_dir")
def projects_stay_among_the_runs(settings: Settings, project: str | None, kept_in: str) -> None:
    parts = re.split(r"[/\\]", project or "")
    if project and (".." in parts or not parts[0] or re.match(r"[A-Za-z]:", project)):
        settings.report("name", f"`{project}` leads out of {kept_in}", "logging.project", help="output_dir says where runs are kept")


@rule("engine.zero_stage")
def zero_shards_something(settings: Settings, stage: int) -> None:
    if stage == 0:
        settings.report("engine", "stage 0 shards nothing: that is the engine ddp", "engine.zero_stage", help="set engine.kind to ddp")


@rule("engine.kind", "training.optimizer.name")
def sharding_leaves_matrices_whole(settings: Settings, engine: str, optimizer: str) -> None:
    if engine in SHARDING and optimizer in WHOLE_MATRICES:
        message = f"{optimizer} looks at whole matrices, and the engine {engine} cuts them"
        settings.report("engine", message, "training.optimizer.name", "engine.kind", help="take AdamW, or the engine ddp")


@rule("engine.kind", "training.optimizer.name", "training.optimizer.moments", "training.optimizer.kwargs")
def narrow_moments_are_adams(settings: Settings, engine: str, optimizer: str, moments: str, keywords: dict[str, Any]) -> None:
    path = "training.optimizer.moments"
    if moments != "fp32" and optimizer not in ("Adam", "AdamW"):
        settings.report("optimizer", f"{optimizer} keeps its means in fp32", path, "training.optimizer.name", help="take Adam or AdamW")
    elif moments != "fp32" and (more := [name for name in keywords if name not in ("betas", "eps", "weight_decay", "lr")]):
        message = f"{optimizer} that keeps its means in {moments} takes no `{more[0]}`"
        settings.report("optimizer", message, f"training.optimizer.kwargs.{more[0]}", path)
    if moments != "fp32" and engine in SHARDING:
        message = f"the engine {engine} keeps the optimizer's means in fp32, a part in each process"
        settings.report("engine", message, path, "engine.kind", help="leave it out, or take the engine single or ddp")


@rule("training.ema.decay", "engine.kind", "strategy.kind")
def averages_are_kept_where_steps_are_taken(settings: Settings, decay: float | None, engine: str, strategy: str) -> None:
    """With workers the coordinator averages, whatever the engine of a worker."""
    if decay is not None and engine == "deepspeed" and strategy == "local":
        message = "DeepSpeed keeps the weights that it steps to itself, and no average of them"
        help = "leave it out, or take the engine fsdp, which shards the average, too"
        settings.report("engine", message, "training.ema.decay", "engine.kind", help=help)


@rule("training.cuda_graph", "engine.kind", "training.precision.kind", "training.gradient_checkpointing")
def recordings_are_of_plain_passes(settings: Settings, records: bool, engine: str, precision: str, recomputes: bool) -> None:
    path = "training.cuda_graph"
    if records and engine not in ("single", "collectives"):
        message = f"a step of the engine {engine} is not recorded: its processes wait for each other in between"
        settings.report("engine", message, path, "engine.kind", help="set it to false, or take the engine single")
    if records and precision == "nvfp4":
        settings.report("precision", f"passes in {precision} are not recorded", path, "training.precision.kind", help="set it to false")
    if records and recomputes:
        settings.report("precision", "passes that compute activations again are not recorded", path, "training.gradient_checkpointing")


@rule("training.cuda_graph", "training.device", "task")
def recordings_are_of_one_network_on_a_gpu(settings: Settings, records: bool, device: str, task: Task | None) -> None:
    if records and device in ("cpu", "mps"):
        message = f"what a CUDA GPU does is recorded, and this run computes on {device}"
        settings.report("device", message, "training.cuda_graph", "training.device", help="set `training.cuda_graph` to false")
    if records and task is not None and task.kind == "gan":
        message = "the passes of one network are recorded, and the task gan has two"
        settings.report("model", message, "training.cuda_graph", "task", help="set `training.cuda_graph` to false")


@rule("training.cuda_graph", "model.episodic_memory.enabled")
def recordings_have_no_memory(settings: Settings, records: bool, remembers: bool) -> None:
    if records and remembers:
        message = "a memory decides in the middle of a step what it replays, and that is not recorded"
        settings.report("model", message, "training.cuda_graph", "model.episodic_memory.enabled", help="set one of them to false")


@rule("engine.kind", "task")
def sharding_takes_one_network(settings: Settings, engine: str, task: Task | None) -> None:
    if engine in SHARDING and task is not None and task.kind == "gan":
        settings.report("engine", f"the engine {engine} shards one network, and the task gan has two", "engine.kind", help="take ddp")


@rule("engine.kind", "model.kind", "training.compile", "training.precision.kind")
def pipelines_cut_language_models(settings: Settings, engine: str, model: str, compile: bool | str, precision: str) -> None:
    """Pipeline stages are layers of a transformer that compute independently."""
    if engine != "pipeline":
        return
    if model not in CUT_INTO_STAGES and names_a_model(settings):
        message = f"a pipeline has the layers of one model on several machines, and a model of kind {model} is not cut"
        help = f"choose model.kind {', '.join(CUT_INTO_STAGES)}, or engine ddp"
        settings.report("engine", message, "engine.kind", "model.kind", help=help)
    if compile is True:
        settings.report("engine", "the stages of a pipeline are not compiled", "training.compile", "engine.kind", help="set it to false")
    if precision in EMULATED:
        message = f"the stages of a pipeline do not emulate {precision}"
        settings.report("engine", message, "training.precision.kind", "engine.kind", help="take bf16, fp16 or fp32")


@rule("engine.kind", "model.cross_attention.enabled", "model.retrieval.enabled", "model.episodic_memory.enabled")
def stages_read_nothing_beside_the_sequence(settings: Settings, engine: str, *reads: bool) -> None:
    """What a model reads beside its sequence goes to blocks that other stages may have."""
    for name, enabled in zip(("cross_attention", "retrieval", "episodic_memory"), reads, strict=True):
        if engine == "pipeline" and enabled:
            message = f"a model with {name.replace('_', ' ')} is not cut into the stages of a pipeline"
            settings.report(
                "engine", message, f"model.{name}.enabled", "engine.kind", help="set it to false, or take the engine ddp or fsdp"
            )


@rule("engine.kind", "model.lora")
def stages_have_no_adapters(settings: Settings, engine: str, lora: Any) -> None:
    if engine == "pipeline" and lora is not None:
        message = "a model with LoRA's matrices beside its weights is not cut into the stages of a pipeline"
        settings.report("engine", message, "model.lora", "engine.kind", help="set it to null, or take the engine ddp or fsdp")


@rule("model.layers", "model.lora", "engine.kind", "training.precision.kind", "model.load")
def own_layers_have_adapters(settings: Settings, layers: str, lora: Any, engine: str, precision: str, load: str) -> None:
    found = against_adapters(engine, precision, load, lora.dora) if layers == "own" and lora is not None else None
    if found is not None:
        help = f"set model.layers to auto, which keeps those of transformers, or change {found[0]}"
        settings.report("model", found[1], "model.layers", found[0], help=help)


@rule("model.load", "model.lora")
def only_frozen_weights_are_stored_in_few_bits(settings: Settings, load: str, lora: Any) -> None:
    if load != "fp32" and lora is None:
        message = f"all weights are trained, and weights in {load} cannot be: an optimizer's steps are smaller than their distances"
        settings.report("load", message, "model.load", "model.lora", help="set model.lora, such as {rank: 8}, or model.load to fp32")


@rule("engine.kind", "model.load")
def fsdp_shards_float32(settings: Settings, engine: str, load: str) -> None:
    if engine == "fsdp" and load != "fp32":
        message = f"fsdp shards the frozen weights too, and weights in {load} are not cut"
        help = "take the engine ddp, where each device has all frozen weights, or set model.load to fp32"
        settings.report("load", message, "model.load", "engine.kind", help=help)


@rule("engine.kind", "engine.zero_stage", "model.load")
def zero_3_shards_float32(settings: Settings, engine: str, stage: int, load: str) -> None:
    if engine == "deepspeed" and stage == 3 and load != "fp32":
        message = f"ZeRO 3 shards the frozen weights too, and weights in {load} are not cut"
        help = "take ZeRO 2, where each device has all frozen weights, or set model.load to fp32"
        settings.report("load", message, "model.load", "engine.zero_stage", help=help)


@rule("training.precision.kind", "engine.kind", "model.load")
def frozen_weights_are_multiplied_as_they_are(settings: Settings, precision: str, engine: str, load: str) -> None:
    if load != "fp32" and (precision in EMULATED or (precision == "fp16" and engine == "deepspeed")):
        message = f"weights that are stored in {load} are not multiplied in {precision}" + (" by DeepSpeed" if precision == "fp16" else "")
        settings.report("load", message, "training.precision.kind", "model.load", help="take bf16 or fp32, or set model.load to fp32")


@rule("engine.kind", "engine.zero_stage", "training.compile")
def partitioned_weights_are_not_compiled(settings: Settings, engine: str, stage: int, compile: bool | str) -> None:
    """ZeRO 3 gathers a layer's weights in hooks that torch's compiler does not see: to the compiler they are empty."""
    if engine == "deepspeed" and stage == 3 and compile is True:
        message = "weights that ZeRO 3 cuts into parts are not there when torch compiles the model"
        settings.report("engine", message, "training.compile", "engine.zero_stage", help="set it to false, or take ZeRO 2 or fsdp")


@rule("engine.nvme_offload", "logging.track_gradients")
def gradients_on_a_disk_are_gone(settings: Settings, offload: bool, track: bool) -> None:
    if offload and track:
        message = "DeepSpeed gives gradients on a disk up with each step, so their norms cannot be recorded"
        settings.report("engine", message, "logging.track_gradients", "engine.nvme_offload")


@rule("engine.kind", "updates.privacy.enabled", "updates.privacy.unit")
def samples_are_clipped_in_one_process(settings: Settings, engine: str, private: bool, unit: str) -> None:
    if private and unit == "sample" and Engine.kinds[engine].several_processes:
        message = f"samples are clipped one by one in a single process, and the engine {engine} is several"
        settings.report("privacy", message, "updates.privacy.unit", "engine.kind", help="set engine.kind to single")


@rule("training.optimizer.kwargs")
def the_learning_rate_has_a_setting_of_its_own(settings: Settings, keywords: dict[str, Any]) -> None:
    if "lr" in keywords:
        own = settings.spelling("training.optimizer.learning_rate")
        settings.report("optimizer", f"`lr` has a setting of its own: `{own}`", "training.optimizer.kwargs.lr")


@rule("training.gradient_checkpointing", "model.kind")
def blocks_are_computed_again(settings: Settings, recomputes: bool, model: str) -> None:
    if recomputes and model in WITHOUT_BLOCKS and names_a_model(settings):
        message = f"a model of kind {model} has no blocks whose activations could be computed again"
        settings.report("model", message, "training.gradient_checkpointing", "model.kind", help="set it to false")


@rule("engine.cpu_offload", "engine.kind", "training.device")
def offload_leaves_a_gpu(settings: Settings, offload: bool, engine: str, device: str) -> None:
    if offload and engine == "fsdp" and device in ("cpu", "mps"):
        message = f"on {device} parameters are in main memory already"
        settings.report("offload", message, "engine.cpu_offload", "training.device", help="set it to false")


@rule("training.precision.kind", "model.kind")
def rounded_products_are_in_blocks(settings: Settings, precision: str, model: str) -> None:
    if precision in EMULATED and model in WITHOUT_BLOCKS and names_a_model(settings):
        message = f"{precision} is for the products in the blocks of a transformer, and a model of kind {model} has none"
        settings.report("precision", message, "training.precision.kind", "model.kind", help="take bf16, fp16 or fp32")
