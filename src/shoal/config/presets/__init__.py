"""The configurations that Shoal ships, by name."""

from __future__ import annotations

import os

FOLDER = os.path.dirname(__file__)


def find(name: str) -> str | None:
    """The file of a preset: `gpu/base`, `configs/gpu/base.yaml`, or its last part alone if that is unique."""
    wanted = name.removeprefix("configs/").removesuffix(".yaml")
    if wanted in names():
        return os.path.join(FOLDER, *wanted.split("/")) + ".yaml"
    alike = [known for known in names() if known.split("/")[-1] == wanted]
    return find(alike[0]) if len(alike) == 1 else None


def names() -> list[str]:
    """Every preset."""
    found = []
    for folder, _, files in os.walk(FOLDER):
        inside = os.path.relpath(folder, FOLDER).replace(os.sep, "/")
        found += [f"{inside}/{file[:-5]}".removeprefix("./") for file in files if file.endswith(".yaml")]
    return sorted(found)
