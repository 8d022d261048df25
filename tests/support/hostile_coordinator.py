"""A coordinator that sends whatever a test wants, and keeps what workers answer."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from shoal.config.load import resolve_data
from shoal.runs.folder.run_directory import settings_text
from shoal.transports import Message
from shoal.transports.keys import new_token
from tests.support.servers import zmq_server

WELCOME: dict[str, Any] = {
    "kind": "welcome",
    "session": "s",
    "seat": 0,
    "epoch": 0,
    "position": 0,
    "last_seq": -1,
    "version": 0,
    "plugins": {},
    "data": {},
    "shards": 1,
    "total_steps": 10,
    "heartbeat_s": 1.0,
    "tokenizer": [],
    "size": 100,
}


def settings(**more: Any) -> dict[str, Any]:
    return {"model": {"kind": "mlp"}, "strategy": {"kind": "syncps"}, "cluster": {"num_workers": 1}, "training": {"device": "cpu"}} | more


class HostileCoordinator:
    """Its welcome is made of `settings`; `text` is put into the sent configuration in place of `PLACE`, and `header` over the welcome."""

    def __init__(self, settings: dict[str, Any], *, text: str = "", header: dict[str, Any] | None = None) -> None:
        made = resolve_data(settings, name="hostile", dialect="shoal", environ={})
        assert made.ok, made.problems
        config = settings_text(made.run).replace("PLACE", text) if text else settings_text(made.run)
        self.welcome = WELCOME | {"config": config, "digest": hashlib.sha256(config.encode()).hexdigest()} | (header or {})
        self.token = new_token()
        self.server = zmq_server(token=self.token, max_frame_bytes=1 << 20)
        self.heard: list[dict[str, Any]] = []
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    def _serve(self) -> None:
        while not self._ending.is_set():
            for request in self.server.poll(0.05):
                header = dict(request.message.header)
                self.heard.append(header)
                self.server.reply(request, Message(self._answer(header)))

    def _answer(self, header: dict[str, Any]) -> dict[str, Any]:
        match header["kind"]:
            case "join":
                return {"name": header.get("name") or "w"} | self.welcome
            case "node":
                return {"kind": "model", **self.welcome["model"]}
            case "heartbeat":
                return {"kind": "pulse"}
            case "leave":
                return {"kind": "goodbye"}
            case _:
                return {"kind": "refused", "reason": "over", "detail": "the run is over"}

    @property
    def said(self) -> str:
        """Everything that workers sent, as text."""
        return repr(self.heard)

    @property
    def reasons(self) -> list[str]:
        return [header["reason"] for header in self.heard if header["kind"] == "leave"]

    def join_command(self, *more: str) -> tuple[str, ...]:
        return ("join", self.server.address, "--token", self.token, "--patience", "30", *more)

    def close(self) -> None:
        self._ending.set()
        self._thread.join()
        self.server.close()


@contextmanager
def hostile_coordinator(settings: dict[str, Any], **options: Any) -> Iterator[HostileCoordinator]:
    made = HostileCoordinator(settings, **options)
    try:
        yield made
    finally:
        made.close()


def private_folder(folder: Path) -> Path:
    """A folder with a file that a worker's user would not show to a coordinator."""
    private = folder / "private"
    private.mkdir()
    (private / "diary.txt").write_text("Dear diary\n" * 1000)
    return private
