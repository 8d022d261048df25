"""Download of the files of a data set from the Hugging Face hub. An interrupted download resumes."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from shoal.data.hub.access import hub_answers, quiet
from shoal.data.interfaces import Progress
from shoal.data.packages import import_optional
from shoal.errors import ShoalError
from shoal.files import file_digest

TRIES = 6
FIRST_WAIT_S = 1.0
_TIMEOUT_S = 20.0


class _File(NamedTuple):
    name: str
    size: int
    sha256: str | None


def copy_files(name: str, folder: Path, token: str | None, progress: Progress | None) -> Path:
    """Download all files of one commit of a data set into `folder`. Each appears complete or not at all. Raises ShoalError."""
    hub = import_optional("huggingface_hub")
    if not hub_answers():
        raise ShoalError("the Hugging Face hub cannot be reached")
    api = hub.HfApi(token=token, library_name="shoal")
    try:
        with quiet():
            info = api.dataset_info(name, files_metadata=True)
    except Exception as error:
        raise _refusal(name, error) from error
    files = [_File(file.rfilename, file.size or 0, file.lfs.sha256 if file.lfs else None) for file in info.siblings]
    target, total = folder / str(info.sha), sum(file.size for file in files)
    done = 0
    for file in files:
        before = done

        def show(received: int, before: int = before) -> None:
            if progress:
                progress(name, before + received, total)

        url = hub.hf_hub_url(name, file.name, repo_type="dataset", revision=info.sha, endpoint=api.endpoint)
        _copy(name, url, target / file.name, file, token, show)
        done += file.size
    return target


def _copy(name: str, url: str, target: Path, file: _File, token: str | None, show: Callable[[int], None]) -> None:
    if target.is_file() and target.stat().st_size == file.size:
        return
    partial = target.with_name(target.name + ".part")
    partial.parent.mkdir(parents=True, exist_ok=True)
    partial.touch()
    failures = 0
    while (had := partial.stat().st_size) < file.size:
        try:
            _receive(url, partial, had, token, show)
        except Exception as error:  # the network library raises errors of its own
            failures = 1 if partial.stat().st_size > had else failures + 1
            if failures == TRIES or _is_permanent(error):
                raise _refusal(name, error) from error
            time.sleep(FIRST_WAIT_S * 2 ** (failures - 1))
    if partial.stat().st_size != file.size or (file.sha256 and file_digest(partial) != file.sha256):
        partial.unlink()
        raise ShoalError(f"{file.name} of {name} came damaged: start again to download it anew")
    partial.replace(target)


def _receive(url: str, partial: Path, had: int, token: str | None, show: Callable[[int], None]) -> None:
    """Append the missing bytes. A server without range requests sends the whole file again."""
    utils = import_optional("huggingface_hub.utils")
    headers = utils.build_hf_headers(token=token, library_name="shoal") | {"Accept-Encoding": "identity"}
    headers |= {"Range": f"bytes={had}-"} if had else {}
    with utils.get_session().stream("GET", url, headers=headers, timeout=_TIMEOUT_S, follow_redirects=True) as response:
        utils.hf_raise_for_status(response)
        with partial.open("ab" if response.status_code == 206 else "wb") as output:
            for chunk in response.iter_bytes():
                output.write(chunk)
                show(output.tell())


def _status(error: BaseException) -> int | None:
    answer = getattr(error, "response", None)
    return None if answer is None else answer.status_code


def _is_permanent(error: Exception) -> bool:
    status = _status(error)
    if status is None:
        return isinstance(error, OSError)  # an error of the disk
    return status < 500 and status not in (408, 429)


def _refusal(name: str, error: Exception) -> ShoalError:
    status = _status(error)
    if status in (401, 403, 404):
        return ShoalError(f"the hub has no {name} that you may read ({status}): check its name, or export HF_TOKEN")
    why = f"the hub answered {status}" if status else f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"
    return ShoalError(f"{why}; what has come is kept, and the next start goes on from there")
