"""A hub on this machine: the part of the Hugging Face hub's HTTP API that its client uses, and the ways in which it fails.

The answers have the form that huggingface_hub 2.4.0 reads; large files go by LFS (HF_HUB_DISABLE_XET=1).
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, NamedTuple

from tests.support.processes import HANG_S

SHA = "0123456789abcdef0123456789abcdef01234567"


class Asked(NamedTuple):
    method: str
    path: str
    headers: dict[str, str]
    body: bytes


class Fault(NamedTuple):
    """What happens instead of an answer: a status; `hang`; `drop`: the connection ends in the middle; `die`: the server ends too."""

    path: str
    status: int | str
    headers: dict[str, str]
    message: str


class Commit(NamedTuple):
    summary: str
    files: dict[str, bytes]


class Repo:
    def __init__(self, private: bool) -> None:
        self.private = private
        self.commits: list[Commit] = []

    @property
    def files(self) -> dict[str, bytes]:
        return {name: content for commit in self.commits for name, content in commit.files.items()}


class FakeHub:
    """What is there, what was asked, and what shall go wrong."""

    def __init__(self) -> None:
        self.repos: dict[str, Repo] = {}
        self.datasets: dict[str, dict[str, bytes]] = {}
        self.stored: dict[str, bytes] = {}
        self.asked: list[Asked] = []
        self.faults: list[Fault] = []
        self.cut_after: int | None = None
        """Bytes of a file's content after which the connection ends, once."""
        self.over = threading.Event()
        self.changed = threading.Condition()
        self.url = ""

    def fail(self, path: str, status: int | str, *, times: int = 1, message: str = "", **headers: str) -> None:
        """The next requests to addresses that match `path` fail."""
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        self.faults += [Fault(path, status, named, message)] * times

    def fault_for(self, path: str) -> Fault | None:
        with self.changed:
            found = next((fault for fault in self.faults if re.search(fault.path, path)), None)
            if found is not None:
                self.faults.remove(found)
            return found

    def note(self, asked: Asked) -> None:
        with self.changed:
            self.asked.append(asked)
            self.changed.notify_all()

    def paths(self) -> list[str]:
        return [f"{asked.method} {asked.path}" for asked in self.asked]

    def wait_for(self, found: Any, within_s: float = HANG_S) -> None:
        """Until `found()`; it is looked at after each request."""
        with self.changed:
            assert self.changed.wait_for(found, within_s), self.paths()

    # --- answers: a status and JSON, or bytes ---------------------------------------------------------

    def answer(self, asked: Asked) -> tuple[int, Any, dict[str, str]]:
        path = asked.path.partition("?")[0]
        for pattern, respond in self._routes():
            found = re.fullmatch(pattern, f"{asked.method} {path}")
            if found:
                return respond(asked, *found.groups())  # type: ignore[no-any-return]
        return 404, {"error": "Not found"}, {}

    def _routes(self) -> list[tuple[str, Any]]:
        return [
            (r"HEAD /", lambda asked: (200, b"", {})),
            (r"POST /api/repos/create", self._create),
            (r"POST /api/validate-yaml", lambda asked: (200, {"errors": [], "warnings": []}, {})),
            (r"GET /api/models/([^/]+/[^/]+)", self._info),
            (r"POST /api/models/([^/]+/[^/]+)/preupload/main", self._modes),
            (r"POST /([^/]+/[^/]+)\.git/info/lfs/objects/batch", self._batch),
            (r"PUT /storage/(\w+)", self._store),
            (r"POST /verify", self._verify),
            (r"POST /api/models/([^/]+/[^/]+)/commit/main", self._commit),
            (r"(?:GET|HEAD) /([^/]+/[^/]+)/resolve/\w+/(.+)", self._resolve),
            (r"GET /api/datasets/([^/]+/[^/]+)", self._dataset),
            (r"GET /datasets/([^/]+/[^/]+)/resolve/(\w+)/(.+)", self._redirect),
            (r"GET /cdn/([^/]+/[^/]+)/(.+)", self._content),
        ]

    def _create(self, asked: Asked) -> tuple[int, Any, dict[str, str]]:
        wanted = json.loads(asked.body)
        name = f"{wanted['organization']}/{wanted['name']}"
        if name in self.repos:
            return 409, {"error": "You already created this model repo", "url": f"{self.url}/{name}"}, {}
        self.repos[name] = Repo(wanted["visibility"] == "private")
        return 200, {"url": f"{self.url}/{name}", "name": name}, {}

    def _info(self, asked: Asked, name: str) -> tuple[int, Any, dict[str, str]]:
        if name not in self.repos:
            return 404, {"error": "Repository not found"}, {"X-Error-Code": "RepoNotFound"}
        return 200, {"id": name, "private": self.repos[name].private, "sha": SHA, "tags": [], "siblings": []}, {}

    def _modes(self, asked: Asked, name: str) -> tuple[int, Any, dict[str, str]]:
        if name not in self.repos:
            return 404, {"error": "Repository not found"}, {"X-Error-Code": "RepoNotFound"}
        large = (".safetensors", ".png")
        files = [
            {"path": file["path"], "uploadMode": "lfs" if file["path"].endswith(large) else "regular", "shouldIgnore": False}
            for file in json.loads(asked.body)["files"]
        ]
        return 200, {"files": files}, {}

    def _batch(self, asked: Asked, name: str) -> tuple[int, Any, dict[str, str]]:
        objects = []
        for wanted in json.loads(asked.body)["objects"]:
            actions = {"upload": {"href": f"{self.url}/storage/{wanted['oid']}"}, "verify": {"href": f"{self.url}/verify"}}
            objects.append(wanted | ({} if wanted["oid"] in self.stored else {"actions": actions}))
        return 200, {"transfer": "basic", "objects": objects}, {}

    def _store(self, asked: Asked, oid: str) -> tuple[int, Any, dict[str, str]]:
        assert hashlib.sha256(asked.body).hexdigest() == oid
        self.stored[oid] = asked.body
        return 200, b"", {}

    def _verify(self, asked: Asked) -> tuple[int, Any, dict[str, str]]:
        wanted = json.loads(asked.body)
        return (200, {}, {}) if len(self.stored.get(wanted["oid"], b"")) == wanted["size"] else (404, {}, {})

    def _commit(self, asked: Asked, name: str) -> tuple[int, Any, dict[str, str]]:
        if name not in self.repos:
            return 404, {"error": "Repository not found"}, {"X-Error-Code": "RepoNotFound"}
        files, summary = {}, ""
        for line in map(json.loads, asked.body.splitlines()):
            value = line["value"]
            if line["key"] == "header":
                summary = value["summary"]
            elif line["key"] == "file":
                files[value["path"]] = base64.b64decode(value["content"])
            else:
                files[value["path"]] = self.stored[value["oid"]]
        self.repos[name].commits.append(Commit(summary, files))
        return 200, {"commitUrl": f"{self.url}/{name}/commit/{SHA}", "commitOid": SHA, "hookOutput": "", "success": True}, {}

    def _resolve(self, asked: Asked, name: str, file: str) -> tuple[int, Any, dict[str, str]]:
        content = self.repos[name].files[file]
        return 200, content, {"X-Repo-Commit": SHA, "ETag": f'"{hashlib.sha256(content).hexdigest()}"'}

    def _dataset(self, asked: Asked, name: str) -> tuple[int, Any, dict[str, str]]:
        if name not in self.datasets:
            return 404, {"error": "Repository not found"}, {"X-Error-Code": "RepoNotFound"}
        files = [
            {
                "rfilename": file,
                "size": len(content),
                "lfs": {"sha256": hashlib.sha256(content).hexdigest(), "size": len(content), "pointerSize": 1},
            }
            for file, content in self.datasets[name].items()
        ]
        return 200, {"id": name, "private": False, "sha": SHA, "tags": [], "siblings": files}, {}

    def _redirect(self, asked: Asked, name: str, revision: str, file: str) -> tuple[int, Any, dict[str, str]]:
        assert revision == SHA, "what is downloaded is of one commit"
        return 302, b"", {"Location": f"{self.url}/cdn/{name}/{file}"}

    def _content(self, asked: Asked, name: str, file: str) -> tuple[int, Any, dict[str, str]]:
        content = self.datasets[name][file]
        found = re.fullmatch(r"bytes=(\d+)-", asked.headers.get("Range", ""))
        if not found:
            return 200, content, {}
        start = int(found[1])
        return 206, content[start:], {"Content-Range": f"bytes {start}-{len(content) - 1}/{len(content)}"}


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    hub: FakeHub

    def _serve(self) -> None:
        hub = self.hub
        fault = hub.fault_for(self.path)
        if fault is not None and fault.status in ("drop", "die"):
            self.rfile.read(min(64, int(self.headers.get("Content-Length", 0))))
            hub.note(Asked(self.command, self.path, dict(self.headers), b""))
            self.close_connection = True
            if fault.status == "die":
                self.server.shutdown()
                self.server.socket.close()
            self.connection.close()
            return
        asked = Asked(self.command, self.path, dict(self.headers), self._body())
        if fault is not None and fault.status == "hang":
            hub.note(asked)
            hub.over.wait(HANG_S)
            self.close_connection = True
            return
        status, content, headers = hub.answer(asked) if fault is None else (fault.status, {"error": fault.message}, fault.headers)
        body = content if isinstance(content, bytes) else json.dumps(content).encode()
        with suppress(OSError):
            self._respond(int(status), body, headers)
        hub.note(asked)

    def _respond(self, status: int, body: bytes, headers: dict[str, str]) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command == "HEAD":
            return
        cut = self.hub.cut_after
        if cut is None or "/cdn/" not in self.path or len(body) <= cut:
            self.wfile.write(body)
            return
        self.hub.cut_after = None
        self.wfile.write(body[:cut])
        self.close_connection = True

    def _body(self) -> bytes:
        if self.headers.get("Transfer-Encoding") != "chunked":
            return self.rfile.read(int(self.headers.get("Content-Length", 0)))
        parts = []
        while size := int(self.rfile.readline(), 16):
            parts.append(self.rfile.read(size))
            self.rfile.readline()
        self.rfile.readline()
        return b"".join(parts)

    do_GET = do_HEAD = do_POST = do_PUT = _serve

    def log_message(self, *arguments: object) -> None:
        return None


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that went away is no news."""


@contextmanager
def serving() -> Iterator[FakeHub]:
    """A hub that answers until the end of the block."""
    hub = FakeHub()
    server = _Server(("127.0.0.1", 0), type("Handler", (_Handler,), {"hub": hub}))
    hub.url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        yield hub
    finally:
        hub.over.set()
        server.shutdown()
        server.server_close()
        thread.join()
