"""Loads the model to serve: from a finished run, a folder of Hugging Face, or a configuration."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from shoal import data
from shoal.config.data_shapes import misfit
from shoal.config.load import ConfigFile, Override, resolve
from shoal.config.presets import find as find_preset
from shoal.config.schema import Run
from shoal.config.schema.serving import Serving
from shoal.data.text.chat_template import ChatTemplate, plain_template, template_of
from shoal.engines.single import choose_device
from shoal.errors import ShoalError
from shoal.files import read_file
from shoal.manifest import check_manifest
from shoal.models.generation.side_texts import SideTexts
from shoal.models.gpt import Gpt
from shoal.models.huggingface.as_gpt import GptConversion, gpt_conversion
from shoal.models.huggingface.batched_lora import BatchedLora
from shoal.models.huggingface.gguf_weights import GgufWeights
from shoal.models.huggingface.model import HuggingFace
from shoal.models.huggingface.pretrained import check_layers, load
from shoal.models.packed.formats import HALF
from shoal.models.packed.layers import pack_loaded
from shoal.models.packed.model import PackedModel, joint_kind, kinds_of, stored_kind
from shoal.models.stages import required_tensors
from shoal.runs.trained_model import find_model, is_run, open_run, settings_of, side_texts_for
from shoal.serve.conversion import conversion, described_file
from shoal.serve.nodes.model_description import describe_gpt, describe_huggingface_model, describe_own_model, meta_model, model_maker
from shoal.serve.nodes.weights import PackedStore, WeightStore
from shoal.serve.tool_formats import ToolFormat, tool_format
from shoal.untrusted.gguf_header import check_gguf
from shoal.untrusted.prompt_process import PromptProcess

PLAIN_STOP_WORDS = ("\nUser:", "\nSystem:")
"""What ends the assistant's turn in text without marks: the next label."""
_MOST_JSON_BYTES = 64 << 20
_ENCODER_BYTES = 8 << 30
"""Memory for encoding a request, the vocabulary included."""


class ServedModel(NamedTuple):
    """A model with all that it needs to answer."""

    name: str
    model: Any
    tokenizer: data.Tokenizer
    template: ChatTemplate
    settings: Serving
    start_ids: tuple[int, ...]
    """What the model expects before every text that is no conversation."""
    eos_ids: frozenset[int]
    nodes: int = 1
    """Machines to spread the layers over, this one counted."""
    tensors: WeightStore | None = None
    """Where the model's numbers are, if they are not in it."""
    described: Mapping[str, Any] | None = None
    """What another machine needs to make the model without numbers; null: the model cannot be spread."""
    gpt_conversion: GptConversion | None = None
    """How the tensors become those of the model, where our own layers compute a model of Hugging Face."""
    packed: PackedModel | None = None
    """The model's structure and tensors, if its layers are packed and on several machines."""
    run: Run | None = None
    """Where machines join, and which there are."""
    beside: SideTexts | None = None
    """The source of the texts that the model retrieves; null: it retrieves nothing, or only from its memory."""
    stop_words: tuple[str, ...] = ()
    """Texts that end the assistant's turn where no token does."""
    adapters: BatchedLora | None = None
    """The LoRA adapters that requests may name; null: none."""
    adapter: str = ""
    """Which of them the requests of this name have; empty: none."""
    tool_format: ToolFormat | None = None
    """How the model writes calls of tools; null: its template has no convention for them."""
    encoder: PromptProcess | None = None
    """Encodes with the tokenizer of a model's maker; null: the tokenizer is Shoal's own, or one that only transformers can read."""

    def encode(self, text: str) -> list[int]:
        return self.tokenizer.encode(text) if self.encoder is None else self.encoder.ask(text)


def open_served(targets: Sequence[str], overrides: list[Override], warn: Callable[[str], None], nodes: int | None = None) -> ServedModel:
    """The model that is named on the command line: one folder, or files of a configuration. `nodes`: machines to spread its layers over;
    null: as many as the settings say. Raises ShoalError."""
    if len(targets) == 1 and is_model(Path(targets[0])):
        if (served := _gguf(Path(targets[0]), overrides, warn, nodes)) is not None:
            return served
        target = find_model(targets[0], warn)
        if is_run(Path(target)):
            return _run(target, overrides, warn, nodes)
        run = settings_of(target, warn, overrides)
        return _hugging_face(run, Path(target).resolve().name, nodes or run.serving.num_nodes or 1)
    target = targets[0]
    run = resolve([ConfigFile(one) for one in targets], overrides).run
    if run.model.kind != "huggingface":
        raise ShoalError(f"{target} names a model of kind {run.model.kind}, which must be trained first: serve the folder of its run")
    machines = 1 + max(len(run.cluster.workers), run.cluster.num_workers or 0)
    return _hugging_face(run, str(getattr(run.model, "pretrained", target)), nodes or run.serving.num_nodes or machines)


def is_model(place: Path) -> bool:
    """Whether a target is to be opened as a model, not read as a configuration. `find_model` reports a name that is neither. A folder may
    have the name of a preset."""
    names_preset = not place.is_dir() and find_preset(str(place)) is not None
    is_configuration = place.is_file() or place.suffix in (".yaml", ".yml") or names_preset
    return place.suffix == ".gguf" or not is_configuration


def _run(target: str, overrides: list[Override], warn: Callable[[str], None], nodes: int | None) -> ServedModel:
    trained = open_run(target, warn)
    model, tokenizer = trained.task.players.get("model"), trained.tokenizer
    if tokenizer is None or model is None:
        raise ShoalError(f"the run at {target} trained a model of kind {trained.run.model.kind}, which does not write text")
    run = resolve([ConfigFile(str(trained.root / "config.yaml"))], overrides, resolved=True).run
    folder = Path(str(getattr(trained.run.model, "pretrained", trained.root)))
    served = _served(trained.root.resolve().name, model, tokenizer, run, nodes or run.serving.num_nodes or 1, folder)
    served = served._replace(beside=side_texts_for(trained))
    if isinstance(model, HuggingFace):
        return _computed(served, WeightStore(model.state_dict()))
    about = describe_own_model(trained.run.model, model)
    kinds = kinds_of(model, run.serving.weights, lambda name: None) if type(model) is Gpt else {}
    if not kinds:
        return served._replace(described=about)
    make = model_maker(about, model.get_parameter, torch.device("cpu"))[0]
    return _packed(served, PackedModel(make, model.get_parameter, kinds), about)


def _hugging_face(run: Run, name: str, nodes: int) -> ServedModel:
    token = run.hub.token.reveal() if run.hub.token else None
    settings: Any = run.model
    tokenizer = data.load_tokenizer(settings.pretrained, token=token)
    if (found := _gpt_of_folder(settings)) is not None:
        return _by_gpt(_served(name, None, tokenizer, run, nodes, Path(settings.pretrained)), *found)
    model, tensors = _without_numbers(settings) or (None, None)
    if model is None or (nodes == 1 and gpt_conversion(model) is None):
        inner = load(settings, token, as_stored=run.serving.weights in ("auto", "bf16"))
        model, tensors = HuggingFace(inner).to(choose_device(run.training.device)), None
    served = _served(name, model.eval(), tokenizer, run, nodes, Path(settings.pretrained))
    return _computed(served, tensors or WeightStore(model.state_dict()))


def _gguf(file: Path, overrides: list[Override], warn: Callable[[str], None], nodes: int | None) -> ServedModel | None:
    """The model of a GGUF file, whose weights are read as they are. None: it is another target, or must be converted."""
    if file.suffix != ".gguf" or not file.is_file():
        return None
    header, folder = check_gguf(file), described_file(file)
    run, own = settings_of(str(folder), warn, overrides), conversion(folder)
    if own is None:
        return None
    try:
        weights = GgufWeights(file, header, own)
    except ShoalError as problem:
        warn(f"{problem}: all weights are converted once")
        return None
    kinds = kinds_of(weights.skeleton, run.serving.weights, weights.stored_kind)
    for change, count in weights.repacked().items() if run.serving.weights == "auto" else ():
        what = "matrices are" if count > 1 else "matrix is"
        warn(f"{file.name}: {count} {what} held in another format, since Shoal does not compute with the one in the file: {change}")
    tokenizer, nodes = data.load_tokenizer(str(folder)), nodes or run.serving.num_nodes or 1
    model = PackedModel(weights.own.make, lambda name: weights.get(name, kinds.get(name)), kinds, packs=False)
    served = _served(file.stem, None, tokenizer, run, nodes, folder)._replace(gpt_conversion=own)
    return _packed(served, model, describe_gpt(weights.own))


def _served(name: str, model: Any, tokenizer: data.Tokenizer, run: Run, nodes: int, folder: Path) -> ServedModel:
    """`folder`: the model's configuration."""
    chat = _chat(tokenizer)
    ends = _ends(model, tokenizer, folder) | chat.ends
    served = ServedModel(name, model, tokenizer, chat.template, run.serving, tokenizer.opening, ends, nodes, run=run)
    return served._replace(stop_words=chat.stop_words, tool_format=tool_format(tokenizer), encoder=encoder_for(tokenizer))


class Chat(NamedTuple):
    """How a model's conversations are written."""

    template: ChatTemplate
    stop_words: tuple[str, ...]
    ends: frozenset[int]
    """The token that ends the assistant's turn, if there is one."""


def _chat(tokenizer: data.Tokenizer) -> Chat:
    """The template that the tokenizer came with, or turns with labels. Raises ShoalError where a template is none."""
    template = template_of(tokenizer)
    if template is None:
        return Chat(plain_template(tokenizer), PLAIN_STOP_WORDS, frozenset())
    template.check()
    end = template.end_of_turn
    ids = tokenizer.encode(end) if end else []
    if len(ids) == 1:
        return Chat(template, (), frozenset(ids))
    return Chat(template, (end,) if end else PLAIN_STOP_WORDS, frozenset())


def encoder_for(tokenizer: data.Tokenizer) -> PromptProcess | None:
    content = tokenizer.as_json()
    return None if content is None else PromptProcess(f"the tokenizer {tokenizer.name}", _ENCODER_BYTES, tokenizer=content)


def _computed(served: ServedModel, tensors: WeightStore) -> ServedModel:
    """The model of Hugging Face by our own layers where they can, else by its own. If it is spread, its numbers stay in their files."""
    own = gpt_conversion(served.model)
    if own is None:
        return _by_its_own_layers(served, tensors, describe_huggingface_model(served.model))
    return _by_gpt(served, own, tensors)


def _by_gpt(served: ServedModel, own: GptConversion, tensors: WeightStore) -> ServedModel:
    """The model by our own layers, with the tensors of the original. Raises ShoalError."""
    assert served.run is not None
    about, weights = describe_gpt(own), served.settings.weights
    if weights == "fp32":
        tensors.served_as = torch.float32
    made = own.make()
    if weights in ("int8", "int4") and not isinstance(made, Gpt):
        raise ShoalError(f"{served.name} is a mixture of experts, which are not packed as {weights}: set serving.weights to auto or bf16")
    kinds = kinds_of(made, weights, lambda name: _stored_kind(own, tensors, name)) if isinstance(made, Gpt) else {}
    device = choose_device(served.run.training.device)
    served = served._replace(gpt_conversion=own)
    if kinds and (served.nodes > 1 or device.type == "cpu" or not set(kinds.values()) <= set(HALF)):
        return _packed(served, PackedModel(own.make, lambda name: own.tensor(name, tensors.get), kinds), about)
    if weights == "bf16":  # on a GPU the whole model computes in half precision
        tensors.served_as = torch.bfloat16
    model = own.make() if served.nodes > 1 else own.convert(tensors.get).to(device)
    return served._replace(model=model, tensors=tensors if served.nodes > 1 else None, described=about)


def _stored_kind(own: GptConversion, tensors: WeightStore, name: str) -> str | None:
    return joint_kind({stored_kind(tensors.stored_type(source)) for source in own.sources(name)})


def _packed(served: ServedModel, model: PackedModel, about: Mapping[str, Any]) -> ServedModel:
    """The model with packed layers: whole, or for several machines."""
    assert served.run is not None
    if served.nodes == 1:
        return served._replace(model=model.load(choose_device(served.run.training.device)), described=about)
    about = {**about, "weights": model.kinds}
    return served._replace(model=model.make(), packed=model, tensors=PackedStore(model), described=about)


def _by_its_own_layers(served: ServedModel, tensors: WeightStore, about: Mapping[str, Any]) -> ServedModel:
    """A model that only transformers computes. Its linear layers are packed where it is whole. Raises ShoalError."""
    weights, model = served.settings.weights, served.model
    if weights in ("int8", "int4") and served.nodes > 1:
        raise ShoalError(
            f"{type(model.inner).__name__} is computed by the layers of transformers, which are packed on one machine only: "
            "set serving.weights to bf16, or serve it with --nodes 1"
        )
    if weights in ("int8", "int4"):
        pack_loaded(model, weights)
    elif weights != "auto":
        tensors.served_as = torch.bfloat16 if weights == "bf16" else torch.float32
        model.to(tensors.served_as)
    return served._replace(tensors=tensors, described=about)


def _gpt_of_folder(settings: Any) -> tuple[GptConversion, WeightStore] | None:
    """How our own layers compute the model of a folder, and its tensors in their files. None where they do not, or where the files name
    their tensors otherwise than the model does."""
    pretrained, folder = Path(settings.pretrained), Path(settings.weights or settings.pretrained)
    if not folder.is_dir() or settings.from_scratch or not pretrained.is_dir():
        return None
    for one in {folder, pretrained}:
        check_manifest(one)
    if (own := conversion(pretrained)) is None:
        return None
    if settings.num_layers is not None and settings.num_layers != own.settings.num_layers:
        layers = own.settings.num_layers
        raise misfit("model.num_layers", settings.num_layers, f"{pretrained} (model.pretrained) has {layers} layers", str(layers))
    tensors = WeightStore.of_folder(folder, "inner.")
    names = (source for name in required_tensors(own.make()) for source in own.sources(name))
    return (own, tensors) if all(name in tensors for name in names) else None


def _without_numbers(settings: Any) -> tuple[HuggingFace, WeightStore] | None:
    """The model of a folder without its numbers, which are read from its files layer by layer. None where the files name their tensors
    otherwise than the model does, or are elsewhere: then the whole model is loaded first."""
    folder = Path(settings.weights or settings.pretrained)
    if not folder.is_dir() or settings.from_scratch or not Path(settings.pretrained).is_dir():
        return None
    for one in {folder, Path(settings.pretrained)}:
        check_manifest(one)
    model = meta_model(Path(settings.pretrained))
    check_layers(settings, model.inner.config)
    tensors = WeightStore.of_folder(folder, "inner.")
    return (model, tensors) if all(name in tensors for name in required_tensors(model)) else None


def _ends(model: Any, tokenizer: data.Tokenizer, folder: Path) -> frozenset[int]:
    """The ids after which an answer is over: the tokenizer's, and those that the model's files name."""
    named = [tokenizer.eos_id, getattr(getattr(getattr(model, "inner", None), "config", None), "eos_token_id", None)]
    named += [_read_object(folder / name).get("eos_token_id") for name in ("config.json", "generation_config.json")]
    ids = [one for several in named for one in (several if isinstance(several, list) else [several])]
    return frozenset(one for one in ids if type(one) is int)


def _read_object(file: Path) -> dict[str, Any]:
    """What a JSON file has by name; nothing where there is none."""
    try:
        found = json.loads(read_file(file, _MOST_JSON_BYTES) or b"{}")
    except (ShoalError, ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}
