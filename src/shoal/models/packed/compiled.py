"""Products with packed matrices by `products.c`, which the C compiler of this machine makes into a library at first use, with `blocks.c`.

Later processes find the library in the user's state folder. Where there is no compiler, `products.py` computes by other ways.

Shapes: M rows of the input, N outputs, D inputs, G groups of a row, X bytes.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from shoal.config.environment import state_folder
from shoal.errors import ShoalError
from shoal.files import make_folder
from shoal.models.packed.formats import GROUP, PackedShape, codes_and_scales

_SOURCES = [Path(__file__).with_name(name) for name in ("products.c", "blocks.c")]
_HEADER = Path(__file__).with_name("vectors.h")
_COMPILERS = ("cc", "gcc", "clang")
_FLAGS = ("-std=gnu11", "-O3", "-fPIC", "-fno-math-errno", "-fno-trapping-math", "-ffp-contract=fast")
_CHOICES = (("-march=native", "-fopenmp"), ("-mcpu=native", "-fopenmp"), ("-march=native",), ("-mcpu=native",), ())
"""Further flags, of which the first are taken that work here."""
_MOST_S = 120
"""Time that the compiler has; one second is usual."""
TILE = 4
"""Outputs whose codes of a group lie side by side in int4."""


def can_multiply(shape: PackedShape) -> bool:
    return shape.kind == "int8" or (shape.kind == "int4" and shape.rows % TILE == 0)


def arranged_int4(raw_X: Tensor, shape: PackedShape) -> Tensor:
    """The codes of a group side by side for every four outputs, and so their scales."""
    codes, scales_GN2 = codes_and_scales(raw_X, shape)
    assert scales_GN2 is not None
    groups = shape.columns // GROUP
    tiles = codes.view(-1, TILE, groups, GROUP // 2).transpose(1, 2)
    scales = scales_GN2.view(groups, -1, TILE, 2).transpose(0, 1).contiguous()
    return torch.cat([tiles.flatten(), scales.view(torch.uint8).flatten()])


def multiply_compiled(x_MD: Tensor, raw_X: Tensor, shape: PackedShape) -> Tensor:
    """The product in float32. Raises RuntimeError where there is no library."""
    loaded = library()
    if loaded is None:
        raise RuntimeError("no C compiler")
    x_MD = x_MD.to(torch.float32).contiguous()
    found_MN = torch.empty(len(x_MD), shape.rows)
    bits, places = 4 if shape.kind == "int4" else 8, (raw_X.data_ptr(), found_MN.data_ptr())
    if loaded.shoal_multiply(bits, x_MD.data_ptr(), len(x_MD), shape.columns, shape.rows, *places, torch.get_num_threads()):
        raise MemoryError
    return found_MN


@cache
def library() -> ctypes.CDLL | None:
    """The compiled library; None: there is no compiler, or no folder for it."""
    compiler = next(filter(None, map(shutil.which, _COMPILERS)), None)
    if compiler is None or sys.platform == "win32":
        return None
    try:
        folder = make_folder(state_folder() / "compiled", private=True)
        place = folder / f"{_digest(compiler)}.so"
        if folder.stat().st_uid != os.getuid() or folder.stat().st_mode & 0o022:
            return None
        return _opened(place) if place.exists() else next(filter(None, (_compiled(place, compiler, flags) for flags in _CHOICES)), None)
    except (OSError, ShoalError):
        return None


def _digest(compiler: str) -> str:
    """Differs where the library does: by source, compiler and processor, as several machines may share a home folder."""
    about = [compiler, repr((_FLAGS, _CHOICES)), torch.__version__, platform.machine(), platform.processor() or platform.node()]
    listed = Path("/proc/cpuinfo")
    lines = listed.read_text(errors="replace").split("\n\n")[0].splitlines() if listed.exists() else []
    about += [line for line in lines if line.startswith(("flags", "Features", "CPU ", "model name"))]
    return hashlib.sha256(b"".join(one.read_bytes() for one in (*_SOURCES, _HEADER)) + "\n".join(about).encode()).hexdigest()[:24]


def _compiled(place: Path, compiler: str, flags: tuple[str, ...]) -> ctypes.CDLL | None:
    """Compile and open the library; None: it does not work with these flags. It is not linked with OpenMP: a process must have one of
    them, and that is torch's."""
    with tempfile.TemporaryDirectory(dir=place.parent) as folder:
        parts, made = [f"{folder}/{one.stem}.o" for one in _SOURCES], f"{folder}/made.so"
        commands = [[*_FLAGS, *flags, "-c", str(one), "-o", part] for one, part in zip(_SOURCES, parts, strict=True)]
        commands.append(["-shared", *parts, "-o", made, "-lm"])
        try:
            for arguments in commands:
                subprocess.run([compiler, *arguments], check=True, capture_output=True, timeout=_MOST_S)
            _opened(Path(made))
        except (OSError, subprocess.SubprocessError):
            return None
        os.replace(made, place)
    return _opened(place)


def _opened(place: Path) -> ctypes.CDLL:
    opened = ctypes.CDLL(str(place))
    number, address = ctypes.c_int64, ctypes.c_void_p
    opened.shoal_multiply.argtypes = [ctypes.c_int, address, number, number, number, address, address, ctypes.c_int]
    opened.shoal_blocks.argtypes = [address, number, address, address, address, address]
    return opened
