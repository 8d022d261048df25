"""Load the data of a run: from its configuration to samples or a stream, held-out samples, and what they are."""

from __future__ import annotations

from pathlib import Path

from shoal.config import Run
from shoal.config.schema.data import Builtin, DataSource, Images, Mnist, Preferences
from shoal.data.hub.dataset import Request
from shoal.data.images.digits import load_digits
from shoal.data.images.mnist import load_mnist
from shoal.data.images.source import load_images
from shoal.data.interfaces import Data, Progress
from shoal.data.streams.load import load_stream
from shoal.data.text.load import load_preferences, load_text
from shoal.data.text.sources import open_parts
from shoal.errors import ShoalError


def load(run: Run, *, progress: Progress | None = None, cache_dir: str | Path | None = None) -> Data:
    """The data that `run.data` describes. `progress(what, done_bytes, total_bytes)` is called while downloading.

    `cache_dir` is where a trained tokenizer and prepared data sets are kept; None: trained anew, and the libraries' own place.
    """
    source = run.data.source
    if source is None:
        raise ShoalError("data.source: there is none")
    wants_text = run.task in ("language-modelling", "ppo")
    if wants_text == _is_images(source):
        kinds = ("text", "images") if wants_text else ("images", "text")
        name = getattr(source, "name", source.kind)
        raise ShoalError(f"data.source: the task {run.task} needs {kinds[0]}, and `{name}` is {kinds[1]}")
    folder = Path(cache_dir).expanduser() if cache_dir else None
    token = run.hub.token.reveal() if run.hub.token else None
    request = Request("", run.data.streaming, str(folder / "datasets") if folder else None, token, progress)
    if _is_images(source):
        if run.data.streaming:
            raise ShoalError("data.streaming: images are not streamed; many of them are decoded when they are needed anyway")
        return _load_images(source, run, request)
    if isinstance(source, Preferences):
        return load_preferences(source, run, folder, token)
    parts = open_parts(source, run, request)
    return load_stream(parts, run, folder, token) if run.data.streaming else load_text(parts, run, folder, token)


def _is_images(source: DataSource) -> bool:
    return isinstance(source, Mnist | Images) or (isinstance(source, Builtin) and source.name == "digits")


def _load_images(source: DataSource, run: Run, request: Request) -> Data:
    if isinstance(source, Mnist):
        return load_mnist(source, run, request.progress)
    if isinstance(source, Images):
        return load_images(source, run, request)
    return load_digits(run)
