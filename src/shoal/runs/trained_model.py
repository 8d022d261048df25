"""Opens a model, whatever form it has: a run, a run in phases, a folder of Hugging Face or PEFT, a GGUF file."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from shoal import data, models, tasks
from shoal.config import Run
from shoal.config.data_shapes import DataShapes
from shoal.config.load import ConfigFile, Override, resolve, resolve_data
from shoal.config.schema.model import HuggingFace, Moe, Mtp
from shoal.data.text.documents import Conversation
from shoal.engines import SingleEngine
from shoal.engines.single import choose_device
from shoal.errors import ShoalError
from shoal.manifest import check_manifest
from shoal.models.huggingface.as_gpt import named_as_in
from shoal.models.packed.layers import pack_linear_layers
from shoal.models.stages import load_tensors
from shoal.runs.build_run import stream_text
from shoal.runs.converted_models import converted
from shoal.runs.folder import plugin_record
from shoal.runs.folder.checkpoint import read_weights
from shoal.runs.folder.phases import newest_policy
from shoal.runs.folder.run_directory import RunDirectory
from shoal.runs.folder.run_reader import DATA
from shoal.runs.monitoring.best_weights import find_weights
from shoal.runs.training.initial_weights import passage_index_of, run_folder_of
from shoal.updates.state_packing import Checkpoint

PUSHED = "model.safetensors"
"""The weights of an exported run, or of its copy on the hub."""
_AHEAD = "model.mtp."
"""The weights of the head that predicts the token after the next."""


class TrainedModel(NamedTuple):
    """Networks with the weights of a run's newest checkpoint, of its copy on the hub, or of a folder of Hugging Face. The checkpoint has
    the weights to use, by the names of these networks, and no state."""

    run: Run
    task: tasks.Task
    checkpoint: Checkpoint
    tokenizer: data.Tokenizer | None
    root: Path
    passages: Path | None = None
    """The index for retrieval."""


def find_model(target: str, warn: Callable[[str], None]) -> str:
    """The run, the checkpoint or the folder of Hugging Face that a target names: one of these, a run in phases, a GGUF file or a PEFT
    folder. Raises ShoalError where there is none."""
    folder = Path(target)
    if is_run(folder):
        return target
    if (phase := newest_policy(folder)) is not None:
        warn(f"{target} is a run in phases: its phase {phase.name} is used")
        return str(phase)
    found = converted(folder)
    if (found / "config.json").is_file():
        return str(found)
    raise ShoalError(
        f"there is no run or model at {target}: name the folder of a run (`shoal runs` lists them), one of its checkpoints, a folder of "
        "Hugging Face or of PEFT, or a GGUF file"
    )


def is_run(folder: Path) -> bool:
    """Whether a folder is that of a run, of its copy on the hub, or one of its checkpoints."""
    return (folder / "config.yaml").is_file() or (folder / "state.json").is_file()


def settings_of(target: str, warn: Callable[[str], None], overrides: Sequence[Override] = ()) -> Run:
    """The settings of a run, or those of a folder of Hugging Face, as `find_model` gives it. A model of Hugging Face has the layers of
    transformers, which are those that are exported and served. Raises ShoalError."""
    if is_run(Path(target)):
        run = _with_base_beside(_settings_of_run(target, warn, overrides), run_folder_of(target))
    else:
        run = _settings_of_folder(target, overrides)
    return run.replace(model=run.model.replace(layers="original")) if isinstance(run.model, HuggingFace) else run


def _with_base_beside(run: Run, root: Path) -> Run:
    """The settings with the place of the model that the run started from. A relative path begins where the run was started, which is
    usually where its folder is: it is looked for beside it if it is not in the current folder."""
    named = Path(getattr(run.model, "pretrained", None) or root)
    beside = [folder / named for folder in root.resolve().parents[:2]]
    if named.exists() or (found := next((one for one in beside if one.is_dir()), None)) is None:
        return run
    return run.replace(model=run.model.replace(pretrained=str(found)))


def _settings_of_folder(folder: str, overrides: Sequence[Override]) -> Run:
    return resolve_data({"model": {"kind": "huggingface", "pretrained": folder}}, name=folder, dialect="shoal", overrides=overrides).run


def _settings_of_run(target: str, warn: Callable[[str], None], overrides: Sequence[Override]) -> Run:
    root = run_folder_of(target)
    pushed = (root / PUSHED).exists()
    if not (root / "config.yaml").exists() or not (pushed or (root / "provenance.json").exists()):
        raise ShoalError(f"there is no run at {target}: `shoal runs` lists those there are")
    if pushed:
        check_manifest(root)
    plugin_record.expect_those_of(root)
    if overrides:
        return resolve([ConfigFile(str(root / "config.yaml"))], overrides, resolved=True).run
    return RunDirectory(root).config() if pushed else RunDirectory(root).config_as_written(warn)


def open_model(target: str, warn: Callable[[str], None], *, to_write: bool = False, weights: str | None = None) -> TrainedModel:
    """The networks of everything that `find_model` finds; `to_write` as in `open_run`. `weights`: how matrices are held, see
    `serving.weights`; null: as the run's settings say. Raises ShoalError."""
    opened = _opened(target, warn, to_write)
    if not to_write and "model" in opened.task.players:
        pack_linear_layers(opened.task.players["model"], weights or opened.run.serving.weights)
    return opened


def _opened(target: str, warn: Callable[[str], None], to_write: bool) -> TrainedModel:
    found = find_model(target, warn)
    if is_run(Path(found)):
        return open_run(found, warn, to_write=to_write)
    run, tokenizer = settings_of(found, warn), data.load_tokenizer(found)
    task = _evaluating(run, DataShapes(vocab_size=tokenizer.vocab_size, eos_id=tokenizer.eos_id))
    for player in task.players.values():
        player.to(choose_device(run.training.device))
    return TrainedModel(run, task, Checkpoint(Path(found), 0, {}, {}), tokenizer, Path(found))


def open_run(path: str, warn: Callable[[str], None], *, to_write: bool = False) -> TrainedModel:
    """The networks of a past run, without its data. `to_write`: they are only written elsewhere, so where the model is one of Hugging Face
    its weights stay in the files of the checkpoint until they are read. Raises ShoalError."""
    if not is_run(Path(path)):
        raise ShoalError(f"there is no run at {path}: `shoal runs` lists those there are")
    run, root = _without_mtp(settings_of(path, warn)), run_folder_of(path)
    raw = DATA.read(root / "data.json")
    if raw is None:
        raise ShoalError(f"the run at {path} was cut off before it began: it has no data.json")
    shape = tuple(raw["image_shape"]) if raw["image_shape"] else None
    tokenizer = data.load_tokenizer(str(root / "tokenizer")) if (root / "tokenizer").is_dir() else None
    eos_id = tokenizer.eos_id if tokenizer else None
    mapped = to_write and isinstance(run.model, HuggingFace)
    task = _evaluating(run, DataShapes(shape, raw["num_classes"], raw["vocab_size"], eos_id), "meta" if mapped else "cpu")
    checkpoint = weights_for_task(path, task, warn)
    checkpoint = checkpoint._replace(weights={name: value for name, value in checkpoint.weights.items() if not name.startswith(_AHEAD)})
    if mapped:
        for name, player in task.players.items():
            load_tensors(player, {one.removeprefix(f"{name}."): value for one, value in checkpoint.weights.items()})
    else:
        SingleEngine(run, task, choose_device(run.training.device), 1).load_weights(checkpoint.weights)
    for player in task.players.values():
        player.eval()
    return TrainedModel(run, task, checkpoint, tokenizer, root, passage_index_of(root))


def _without_mtp(run: Run) -> Run:
    """The settings without the head that predicts the token after the next: it serves training alone."""
    if isinstance(run.model, Moe) and run.model.mtp.enabled:
        return run.replace(model=run.model.replace(mtp=Mtp()))
    return run


def weights_for_task(path: str, task: tasks.Task, warn: Callable[[str], None]) -> Checkpoint:
    """The weights to use of a run, of its copy on the hub, or of one of its checkpoints, by the names that they have in the networks of the
    task. Raises ShoalError."""
    pushed = run_folder_of(path) / PUSHED
    found = read_weights(pushed) if pushed.exists() else find_weights(path, warn)
    return Checkpoint(found.path, found.step, named_as_in(task.players, found.weights_to_use), {})


def _evaluating(run: Run, shapes: DataShapes, device: str = "cpu") -> tasks.Task:
    """The task with its networks, in evaluation mode."""
    task = tasks.build(run, models.build(run, shapes, device), shapes)
    for player in task.players.values():
        player.eval()
    return task


def generate_text(
    trained: TrainedModel, prompt: str, *, max_new_tokens: int, seed: int, decoding: Any = None, context: str = "", chat: bool = False
) -> Iterator[str]:
    """Yield the text that the model generates after a prompt. `context`: a side text that the model reads; `chat`: the prompt is what a
    user says, and the text is the assistant's answer."""
    if trained.tokenizer is None:
        raise ShoalError(f"a model of kind {trained.run.model.kind} does not write text; --grid draws images")
    if context and not getattr(getattr(trained.run.model, "cross_attention", None), "enabled", False):
        raise ShoalError("this model reads no context: it was trained without model.cross_attention.enabled")
    decoding, beside = decoding or trained.run.serving.decoding, side_texts_for(trained, context)
    ids, end = None, None
    if chat:
        encoder = data.PromptEncoder(trained.tokenizer)
        messages = [{"role": "user", "content": prompt}]
        ids, end = encoder.encode(data.Prompt(prompt, conversation=Conversation(messages, where="--chat"))), encoder.end_id
    yield from stream_text(trained.task.players["model"], trained.tokenizer, prompt, max_new_tokens, seed, decoding, beside, ids, end)


def side_texts_for(trained: TrainedModel, context: str = "") -> models.SideTexts | None:
    """The side texts of the model: passages retrieved from its index, and a context."""
    assert trained.tokenizer is not None
    finder = data.open_finder(trained.run, trained.passages, trained.tokenizer) if trained.passages else None
    return models.make_side_texts(finder, [trained.tokenizer.encode(context)] if context else ())
