"""loss.png: what is in the records can be seen in it."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

from PIL import Image

from shoal.reporters.plots import save_curves
from shoal.reporters.sinks import LossCurve
from shoal.runs.folder.run_directory import RunDirectory

BLUE, RED = (0x1F, 0x77, 0xB4), (0xD6, 0x27, 0x28)


def colours(path: Path) -> dict[tuple[int, int, int], int]:
    with Image.open(path) as image:
        found: Any = image.convert("RGB").getcolors(1 << 24)
    return {colour: count for count, colour in found}


def ink(path: Path, box: tuple[int, int, int, int]) -> int:
    """Dark pixels in a part of the picture."""
    with Image.open(path) as image:
        return sum(image.convert("L").crop(box).histogram()[:100])


def test_a_single_point_can_be_seen(tmp_path: Path) -> None:
    save_curves({"train loss": [(1, 2.0)]}, tmp_path / "one.png")
    save_curves({"eval loss": [(1, 1.0)], "train loss": [(1, 2.0)]}, tmp_path / "two.png")
    legend = 24 * 4
    assert colours(tmp_path / "one.png")[BLUE] > legend + 15
    assert colours(tmp_path / "two.png")[RED] > legend + 15


def test_both_axes_have_a_title(tmp_path: Path) -> None:
    for name, title in (("with", "loss"), ("without", "")):
        save_curves({"train loss": [(1, 2.0), (9, 1.0)]}, tmp_path / f"{name}.png", x_title="step" if title else "", y_title=title)
    left, below = (0, 150, 35, 350), (300, 465, 600, 500)
    for part in (left, below):
        assert ink(tmp_path / "with.png", part) > 20
        assert not ink(tmp_path / "without.png", part)


def test_values_that_no_picture_can_hold_are_left_out(tmp_path: Path) -> None:
    save_curves({"train loss": [(1, 2.0), (2, 1e308), (3, float("nan")), (4, float("inf"))]}, tmp_path / "loss.png")
    assert colours(tmp_path / "loss.png")[BLUE]
    save_curves({"train loss": [(2, 1e308)]}, tmp_path / "none.png")
    assert not (tmp_path / "none.png").exists()


def test_a_loss_that_was_not_finite_is_no_reason_to_have_no_picture(tmp_path: Path) -> None:
    directory = RunDirectory(tmp_path)
    for step, loss in ((1, 2.0), (2, float("nan")), (3, 1e308)):
        directory.record({"step": step, "split": "train", "loss": loss})
    curve = LossCurve()
    recorder: Any = SimpleNamespace(directory=directory, step_name="round")
    curve.start(recorder)
    curve.close({})
    directory.close()
    assert (tmp_path / "loss.png").exists()
