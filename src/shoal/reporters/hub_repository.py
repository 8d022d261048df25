"""A repository of the Hugging Face hub as a place for files: made when it is missing, written one commit at a time."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from shoal.config.schema.output import Hub
from shoal.data.hub.access import quiet
from shoal.errors import ShoalError

REQUEST_TIMEOUT_S = 60.0
_PASSING = (408, 409, 412, 425, 429)


class PushError(Exception):
    """Why files did not get to the hub. `lasting`: a person must change something first, so trying again soon is of no use."""

    def __init__(self, reason: str, *, lasting: bool = False, wait_s: float | None = None) -> None:
        super().__init__(reason)
        self.lasting = lasting
        self.wait_s = wait_s
        """How long the hub asked us to wait."""


class Repository:
    """The repository that `hub.repo_id` names."""

    def __init__(self, settings: Hub) -> None:
        try:
            import huggingface_hub
        except ImportError:
            raise ShoalError("hub.enabled: huggingface_hub is not installed: pip install 'shoal[hf]'") from None
        if settings.token is None or not settings.token.reveal():
            raise ShoalError("hub.enabled: uploads need a token with write access: export HF_TOKEN=hf_… before the run")
        self._hub: Any = huggingface_hub
        self._api = huggingface_hub.HfApi(token=settings.token.reveal(), library_name="shoal")
        self._settings = settings
        self._ready = False
        self.url = f"{self._api.endpoint}/{settings.repo_id}"
        self.notes: list[str] = []
        """Messages for the user that are not failures."""

    def commit(self, files: dict[str, bytes | Path], message: str) -> None:
        """Put files there in one commit. Raises PushError, and nothing else."""
        self._hub.set_client_factory(self._client)
        self._hub.utils.disable_progress_bars()
        try:
            with quiet():
                self._make()
                adding = [self._hub.CommitOperationAdd(name, content) for name, content in files.items()]
                self._api.create_commit(self._settings.repo_id, adding, commit_message=message)
        except Exception as error:  # the library raises what its parts raise: HTTP, sockets, files, JSON, Rust
            raise self._explain(error) from error

    def _client(self) -> Any:
        """The library's client, with a limit on waiting: by itself it would wait for ever."""
        from huggingface_hub.utils._http import default_client_factory

        client = default_client_factory()
        client.timeout = REQUEST_TIMEOUT_S
        return client

    def _make(self) -> None:
        """Make the repository. One that exists already is left as it is."""
        if self._ready:
            return
        name, private = self._settings.repo_id, self._settings.private
        self._api.create_repo(name, private=private, exist_ok=True)
        if bool(self._api.model_info(name).private) != private:
            visibility, wanted = ("public", "true") if private else ("private", "false")
            self.notes.append(f"{self.url} is {visibility}, though hub.private is {wanted}: it stays as it is; change it in its settings")
        self._ready = True

    def _explain(self, error: Exception) -> PushError:
        answer = _answer(error)
        if answer is None:
            lasting = isinstance(error, ValueError) and not isinstance(error, UnicodeError)
            return PushError(_first_line(error), lasting=lasting)
        status, name = answer.status_code, self._settings.repo_id
        self._ready = self._ready and status != 404  # it was deleted or renamed: make it again
        said = {
            401: "the hub does not accept the token (401): make one with write access in the hub's settings, and export it as HF_TOKEN",
            403: f"the token may not write to {name} (403): give it write access, or set hub.repo_id to a place of your own",
            404: f"there is no {name} that this token may see (404): check hub.repo_id",
        }.get(status)
        passing = status >= 500 or status in _PASSING
        return PushError(said or _described(answer, error), lasting=not passing, wait_s=_wait(answer.headers) if passing else None)


def _answer(error: BaseException) -> Any:
    """The hub's answer behind an error, if there was one."""
    cause: BaseException | None = error
    while cause is not None:
        if getattr(cause, "response", None) is not None:
            return cause.response  # type: ignore[attr-defined]
        cause = cause.__cause__
    return None


def _described(answer: Any, error: BaseException) -> str:
    said = str(getattr(error, "server_message", "") or "").strip().split("\n")[0]
    return f"the hub answered {answer.status_code} {answer.reason_phrase}" + (f": {said}" if said else "")


def _first_line(error: BaseException) -> str:
    """The first line of an error, without addresses, because these may carry signatures."""
    while error.__cause__ is not None:
        error = error.__cause__
    words = str(error).strip().split("\n")[0].split()
    return f"{type(error).__name__}: {' '.join('…' if '://' in word else word for word in words)}".rstrip(": ")[:200]


def _wait(headers: Any) -> float | None:
    """Seconds that the hub asks to wait: its own header says it for a used-up quota, the usual one otherwise."""
    from huggingface_hub import utils

    limit = utils.parse_ratelimit_headers(headers)  # type: ignore[attr-defined]
    if limit is not None and limit.remaining == 0:
        return float(limit.reset_in_seconds)
    after = headers.get("retry-after", "").strip()
    return float(after) if after.isdigit() else None
