"""How Shoal's own layers compute a model of transformers: found once for each configuration, and kept.

A server needs transformers for this alone, which takes 170 MB of memory. So another process imports it, and ends.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from shoal.errors import ShoalError
from shoal.files import read_file
from shoal.models.huggingface.as_gpt import FAMILIES, GptConversion, gpt_conversion
from shoal.models.huggingface.gguf_weights import ARCHITECTURES
from shoal.models.huggingface.gpt_description import keep_conversion, kept_conversion
from shoal.runs.converted_models import described, is_described
from shoal.serve.nodes.model_description import meta_model
from shoal.untrusted.gguf_header import check_gguf

_MOST_BYTES = 64 << 20
_PROGRAM = "import sys; from shoal.serve.conversion import main; main(sys.argv[1])"


def conversion(folder: Path) -> GptConversion | None:
    """How our own layers compute the model of a folder; None: they do not."""
    own = kept_conversion(folder)
    if own is None and _family(folder) in FAMILIES:
        _find_apart(folder)
        own = kept_conversion(folder)
    return own or _found(folder)


def described_file(file: Path) -> Path:
    """As `described`; the conversion of the file's model is found with it."""
    if not is_described(file) and check_gguf(file).architecture in ARCHITECTURES:
        _find_apart(file)
    return described(file)


def _family(folder: Path) -> str:
    try:
        found = json.loads(read_file(folder / "config.json", _MOST_BYTES) or b"{}")
    except (ValueError, RecursionError):
        return ""
    return str(found.get("model_type")) if isinstance(found, dict) else ""


def _found(folder: Path) -> GptConversion | None:
    if (own := gpt_conversion(meta_model(folder))) is not None:
        keep_conversion(folder, own)
    return own


def _find_apart(place: Path) -> None:
    """Find and keep a conversion in another process, unless this one has imported transformers already. What goes wrong there is found
    again, and reported, in this process."""
    if "transformers" not in sys.modules:
        subprocess.run([sys.executable, "-c", _PROGRAM, str(place)], capture_output=True, check=False)


def main(place: str) -> None:
    """What the other process does."""
    try:
        _found(described(Path(place)) if Path(place).is_file() else Path(place))
    except ShoalError as problem:
        sys.stderr.write(f"{problem}\n")
