"""Load the data of a run: from its configuration to samples or a stream, held-out samples, and their description."""

from __future__ import annotations

from pathlib import Path

from shoal.config import Run
from shoal.config.schema.data import Builtin
from shoal.config.schema.task import TEXT
from shoal.data.hub.dataset import DataRequest
from shoal.data.images.digits import load_digits
from shoal.data.interfaces import Progress
from shoal.data.loaded_data import Data
from shoal.data.retrieval.load_index import with_retrieval
from shoal.data.streams.load_stream import load_stream
from shoal.data.text.documents import TextPart
from shoal.data.text.load_text import LoadedText, load_text
from shoal.data.text.python_source import python_source, zen_of_python
from shoal.data.user_data import adapt_plugin_data
from shoal.errors import ShoalError


def load(run: Run, *, progress: Progress | None = None, cache_dir: str | Path | None = None) -> Data:
    """The data that `run.data` describes. `progress(what, done_bytes, total_bytes)` is called while downloading.

    `cache_dir`: folder of trained tokenizers and prepared data sets; None: tokenizers are trained again, and libraries use their own cache.
    """
    source, task = run.data.source, run.chosen_task
    if source is None:
        raise ShoalError("data.source: there is none")
    wanted = "text" if task.needs in TEXT else "images"
    if source.gives != wanted:
        name = getattr(source, "name", source.kind)
        raise ShoalError(f"data.source: the task {task.kind} needs {wanted}, and `{name}` is {source.gives}")
    if wanted == "images" and run.data.streaming:
        raise ShoalError("data.streaming: images are not streamed; many of them are decoded when they are needed anyway")
    folder = Path(cache_dir).expanduser() if cache_dir else None
    token = run.hub.token.reveal() if run.hub.token else None
    request = DataRequest("", run.data.streaming, str(folder / "datasets") if folder else None, token, progress, folder=folder)
    found = source.builder()(source, run, request)
    if isinstance(found, Data):
        return adapt_plugin_data(found)
    read = load_stream if run.data.streaming else load_text
    made = found if isinstance(found, LoadedText) else read(found, run, folder, token)
    return with_retrieval(made.data, run, made.training_text, progress)


def load_builtin(source: Builtin, run: Run, request: DataRequest) -> Data | list[TextPart]:
    """Data that comes with Python packages, so that a first run needs no files: digits, Python's source code, and the Zen of Python."""
    if source.name == "digits":
        return load_digits(run)
    return [zen_of_python() if source.name == "zen" else python_source()]
