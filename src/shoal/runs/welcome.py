"""The welcome message that a worker gets: settings, fingerprint of the data, tokenizer files. The worker builds its parts of the run from
it, or reports why it cannot."""

from __future__ import annotations

import hashlib
import re
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from shoal.config import Run, plugins
from shoal.config.derived_values import USER_KINDS
from shoal.config.environment import hub_token
from shoal.config.fields import Secret
from shoal.config.load import LoadedConfig, Override, resolve_received
from shoal.config.problems import ConfigError
from shoal.config.received import Permissions, Sent, hub_names, read_received
from shoal.data import fingerprint
from shoal.data.interfaces import Progress
from shoal.data.text.tokenizers.files import TEMPLATES
from shoal.engines import Rendezvous, choose_device, cuda_graph
from shoal.engines.precision import fp8
from shoal.errors import ShoalError
from shoal.files import make_folder, writing
from shoal.protocol.messages import Frames, Message
from shoal.protocol.worker_names import is_worker_name
from shoal.runs.build_run import RunParts, assemble
from shoal.runs.live_objects import NO_LIVE_OBJECTS, LiveObjects

WORKER_SETTINGS = ("data.source", "data.loader", "training.device", "training.compile", "engine", "launch")
"""Settings that a worker may override: where its data lies, and how and on how many devices it computes."""
_NUMBERS = {"size": 0, "shards": 1, "total_steps": 0, "seat": 0, "epoch": 0, "position": 0, "last_seq": -1}
"""Numbers of a welcome, and the least value of each."""
_MOST, _MOST_FILES, _LEAST_HEARTBEAT_S, _FLOAT_BYTES = 2**53, 64, 0.01, 4
_PLAIN_NAME = re.compile(r"[\w.-]+")


def parts_for(
    welcome: Message,
    run: Run,
    rendezvous: Rendezvous | None,
    progress: Progress | None = None,
    live: LiveObjects = NO_LIVE_OBJECTS,
) -> RunParts:
    """The parts on this machine of a run that a welcome describes. Raises ShoalError where they differ from the coordinator's."""
    header, frames = welcome
    here = rendezvous.here if rendezvous is not None else None
    device = choose_device(run.training.device, here.local_rank if here else 0)
    fp8.check(run.training, device)
    cuda_graph.check(run.training, device)
    world = rendezvous.enter(device) if rendezvous is not None else None
    with tempfile.TemporaryDirectory(prefix="shoal-") as folder:
        unpack(Path(folder) / "tokenizer", header["tokenizer"], frames)
        parts = assemble(run, progress, Path(folder), lambda samples: int(header["total_steps"]), here, world, live, joins=True)
    if fingerprint(parts.data) != header["data"]:
        source = run.data.source.kind if run.data.source is not None else ""
        remedy = (
            "the function must return the same samples on every machine"
            if source in USER_KINDS
            else "put the same files in place, or name them with --set data.source.path=…"
        )
        raise ShoalError(f"the data here ({parts.data.info.name}) is not what the coordinator has: {remedy}")
    if parts.engine.size != header["size"]:
        raise ShoalError(f"the model here has {parts.engine.size} parameters, the coordinator's {header['size']}")
    return parts


def configuration(header: dict[str, Any], overrides: Sequence[Override], permissions: Permissions) -> Run:
    """The settings that the coordinator sent, with this worker's overrides, within this machine's limits. Raises ShoalError."""
    _refuse_damaged(header)
    plugins.require_same(header.get("plugins", {}), "this run")
    for override in overrides:
        if not override.path.startswith(WORKER_SETTINGS):
            raise ShoalError(f"`{override.path}` is the run's to set, not a worker's; a worker may set {', '.join(WORKER_SETTINGS)}")
    loaded = settings_of(header, overrides, permissions)
    if not loaded.ok:
        raise ConfigError(loaded.problems)
    return _with_hub_token(loaded.run, permissions)


def _with_hub_token(run: Run, permissions: Permissions) -> Run:
    """The run with this machine's own token for the hub, if its user allowed that for every name that the run reads there."""
    token = hub_token()
    if token is None or not (names := hub_names(run)) or not names <= permissions.hub_names:
        return run
    return run.replace(hub=run.hub.replace(token=Secret(token)))


def stored_configuration(header: dict[str, Any]) -> Run:
    """The settings of a run that its own coordinator has stored, and reads again. Raises ShoalError."""
    _refuse_damaged(header)
    return resolve_received(header["config"]).run


def _refuse_damaged(header: dict[str, Any]) -> None:
    if hashlib.sha256(header["config"].encode()).hexdigest() != header["digest"]:
        raise ShoalError("the configuration was damaged on its way: try again")


def settings_of(header: dict[str, Any], overrides: Sequence[Override], permissions: Permissions) -> LoadedConfig:
    """The settings that a coordinator sent, with overrides on top, within this machine's limits."""
    return read_received(header["config"], overrides, permissions, Sent(bool(header.get("tokenizer")), "images" in header))


def check_welcome(header: Mapping[str, Any], memory_bytes: int | None) -> None:
    """Raises ShoalError where a welcome message is not one, or the model that it announces cannot fit the memory of this machine."""
    texts = all(isinstance(header.get(name), str) for name in ("config", "digest", "session"))
    numbers = all(type(header.get(name)) is int and low <= header[name] <= _MOST for name, low in _NUMBERS.items())
    files, pause_s = header.get("tokenizer"), header.get("heartbeat_s")
    named = isinstance(files, list) and len(files) <= _MOST_FILES and all(isinstance(name, str) for name in files)
    paused = isinstance(pause_s, int | float) and pause_s >= _LEAST_HEARTBEAT_S
    if not (texts and is_worker_name(header.get("name")) and numbers and named and paused and isinstance(header.get("plugins", {}), dict)):
        raise ShoalError("the coordinator's welcome is not one of this version of Shoal: ask its owner which version runs there")
    if memory_bytes is not None and _FLOAT_BYTES * header["size"] > memory_bytes:
        raise ShoalError(
            f"the coordinator's model has {header['size']:,} weights, {_FLOAT_BYTES * header['size'] / 1e9:,.1f} GB, and this machine has "
            f"{memory_bytes / 1e9:.1f} GB free: it needs a larger one"
        )


def unpack(folder: Path, names: Sequence[str], frames: Frames) -> None:
    """Write the tokenizer's files. Their names are not trusted: none may lead out of the folder."""
    for name, content in zip(names, frames, strict=True):
        plain = name.removeprefix(f"{TEMPLATES}/")
        if not _PLAIN_NAME.fullmatch(plain) or plain.startswith("."):
            raise ShoalError(f"the coordinator sent a file with an impossible name: {name!r}")
        make_folder((folder / name).parent)
        with writing(folder / name):
            (folder / name).write_bytes(content)
