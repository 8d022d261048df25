"""`shoal manifest FOLDER`: checks a folder with a model against its manifest, or writes the manifest anew."""

from __future__ import annotations

from pathlib import Path

from shoal.cli.main import parser_of
from shoal.errors import ShoalError
from shoal.manifest import FILE, check_manifest, write_manifest

EPILOG = f"""\
{FILE} lists the SHA-256 of every file of the folder but notes (*.md) and hidden files. `shoal export` and runs write it; `serve`,
`generate`, `eval` and training refuse a file that has changed since. After an edit on purpose, --write takes the folder as it is.
"""


def run(argv: list[str]) -> int:
    parser = parser_of("manifest", "Check the files of a model against the manifest of their folder.", EPILOG)
    parser.add_argument("folder", metavar="FOLDER", help="an exported model, a run, or any folder with a model")
    parser.add_argument("--write", action="store_true", help="write the manifest of the files as they are now")
    arguments = parser.parse_args(argv)
    folder = Path(arguments.folder)
    if not folder.is_dir():
        raise ShoalError(f"there is no folder {folder}")
    if arguments.write:
        print(f"{folder / FILE} lists {write_manifest(folder, _of_a_run(folder))} files")
        return 0
    count = check_manifest(folder)
    if count is None:
        raise ShoalError(f"{folder} has no {FILE}: `shoal manifest {folder} --write` writes one for the files as they are now")
    print(f"all {count} files are as {FILE} says")
    return 0


def _of_a_run(folder: Path) -> list[str] | None:
    """The files that a run lists; the rest of its folder changes while it goes on, or has checksums of its own. None: it is no run."""
    from shoal.runs.folder.run_directory import unchanging_files

    is_run = (folder / "config.yaml").exists() and not (folder / "model.safetensors").exists()
    return unchanging_files(folder) if is_run else None
