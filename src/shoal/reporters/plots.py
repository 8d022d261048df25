"""Curves as a PNG, drawn with Pillow: a plotting library would be the largest thing installed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from shoal.files import writing

_WIDTH, _HEIGHT = 900, 500
_LEFT, _RIGHT, _TOP, _BOTTOM = 90, 30, 30, 70
_COLOURS = ("#1f77b4", "#d62728", "#2ca02c", "#9467bd", "#ff7f0e", "#17becf")
_GRID, _FRAME = "#e5e5e5", "#808080"
_TICKS, _DOT, _LINE = 5, 3, 2
_ROUNDED = 0.01
"""A value that was rounded for its text may lie so much of the axis beyond its end."""
_LARGEST = 1e100
"""A value beyond this is left out: it would press all others onto one line, and no picture can hold its differences."""

Point = tuple[float, float]
Points = list[Point]


def save_curves(curves: dict[str, Points], path: Path, *, x_title: str = "step", y_title: str = "loss") -> None:
    """Draw curves with axes and a legend. Curves without a value that can be drawn are left out; without any there is no picture."""
    drawable = {
        name: kept
        for name, curve in curves.items()
        if (kept := [point for point in curve if all(-_LARGEST < value < _LARGEST for value in point)])
    }
    if not drawable:
        return
    from PIL import Image, ImageDraw, ImageFont

    image = Image.new("RGB", (_WIDTH, _HEIGHT), "white")
    draw, font = ImageDraw.Draw(image), ImageFont.load_default(14)
    points = [point for curve in drawable.values() for point in curve]
    ranges = [_range([point[axis] for point in points]) for axis in (0, 1)]
    _draw_axes(draw, font, ranges)
    draw.text((_LEFT + (_WIDTH - _LEFT - _RIGHT) / 2, _HEIGHT - 22), x_title, fill="black", font=font, anchor="mm")
    _write_upright(image, y_title, font)
    for number, (name, curve) in enumerate(drawable.items()):
        colour = _COLOURS[number % len(_COLOURS)]
        _draw_curve(draw, [_place(point, ranges) for point in curve], colour)
        _draw_legend(draw, font, number, name, colour)
    with writing(path):
        image.save(path)


def save_heat_map(rows: list[list[float]], path: Path, *, x_title: str, y_title: str) -> None:
    """A square for each number, first row on top: white for 0, the darker the nearer to the largest. The numbers' range stands below."""
    from PIL import Image, ImageDraw, ImageFont

    wide, tall = max(map(len, rows)), len(rows)
    cell = max(4, min(40, (_WIDTH - _LEFT - _RIGHT) // wide))
    image = Image.new("RGB", (max(_WIDTH // 2, _LEFT + wide * cell + _RIGHT), _TOP + tall * cell + _BOTTOM), "white")
    draw, font = ImageDraw.Draw(image), ImageFont.load_default(14)
    largest = max((value for row in rows for value in row), default=0.0) or 1.0
    for y, row in enumerate(rows):
        for x, value in enumerate(row):
            left, top = _LEFT + x * cell, _TOP + y * cell
            draw.rectangle([(left, top), (left + cell - 1, top + cell - 1)], fill=_shade(value / largest), outline=_GRID)
        draw.text((_LEFT - 8, _TOP + (y + 0.5) * cell), f"{y_title} {y}", fill="black", font=font, anchor="rm")
    draw.text((_LEFT, _TOP + tall * cell + 20), f"{x_title} 0 to {wide - 1}; white is 0, dark is {largest:.3g}", fill="black", font=font)
    with writing(path):
        image.save(path)


def _shade(share: float) -> tuple[int, int, int]:
    """From white to the first colour of curves."""
    red, green, blue = (round(255 - min(1.0, max(0.0, share)) * (255 - end)) for end in (0x1F, 0x77, 0xB4))
    return red, green, blue


def _range(values: list[float]) -> Point:
    low, high = min(values), max(values)
    return (low, high) if high > low else (low - 0.5, high + 0.5)


def _place(point: Point, ranges: list[Point]) -> Point:
    """Where a point is in the picture."""
    (low_x, high_x), (low_y, high_y) = ranges
    x = _LEFT + (point[0] - low_x) / (high_x - low_x) * (_WIDTH - _LEFT - _RIGHT)
    y = _HEIGHT - _BOTTOM - (point[1] - low_y) / (high_y - low_y) * (_HEIGHT - _TOP - _BOTTOM)
    return x, y


def _ticks(span: Point, short: Callable[[float], str]) -> list[tuple[float, str]]:
    """Values at about even distances, as they are written beside the axis; none twice."""
    low, high = span
    texts = dict.fromkeys(short(low + (high - low) * part / (_TICKS - 1)) for part in range(_TICKS))
    ticks = [(float(text), text) for text in texts]
    return [(value, text) for value, text in ticks if low - _ROUNDED * (high - low) <= value <= high + _ROUNDED * (high - low)]


def _draw_axes(draw: Any, font: Any, ranges: list[Point]) -> None:
    across, up = ranges
    for value, text in _ticks(up, lambda value: f"{value:.4g}"):
        x, y = _place((across[0], value), ranges)
        draw.line([(x, y), (_WIDTH - _RIGHT, y)], fill=_GRID)
        draw.text((x - 8, y), text, fill="black", font=font, anchor="rm")
    for value, text in _ticks(across, lambda value: f"{value:.0f}"):
        x, y = _place((value, up[0]), ranges)
        draw.line([(x, y), (x, y + 5)], fill=_FRAME)
        draw.text((x, y + 18), text, fill="black", font=font, anchor="mm")
    draw.rectangle([_place((across[0], up[1]), ranges), _place((across[1], up[0]), ranges)], outline=_FRAME)


def _draw_curve(draw: Any, places: Points, colour: str) -> None:
    """A line; and dots where there are so few points that a line says little, or is none."""
    if len(places) > 1:
        draw.line(places, fill=colour, width=_LINE, joint="curve")
    if len(places) <= 20:
        for x, y in places:
            draw.ellipse([(x - _DOT, y - _DOT), (x + _DOT, y + _DOT)], fill=colour)


def _draw_legend(draw: Any, font: Any, number: int, name: str, colour: str) -> None:
    """At the upper right, where losses seldom are. The stroke is drawn: a font may lack the sign for it."""
    y, right = _TOP + 16 + 20 * number, _WIDTH - _RIGHT - 12
    draw.line([(right - 24, y), (right, y)], fill=colour, width=_LINE + 1)
    draw.text((right - 32, y), name, fill="black", font=font, anchor="rm")


def _write_upright(image: Any, text: str, font: Any) -> None:
    from PIL import Image, ImageDraw

    width = int(font.getlength(text)) + 4
    written = Image.new("RGB", (width, 20), "white")
    ImageDraw.Draw(written).text((2, 10), text, fill="black", font=font, anchor="lm")
    image.paste(written.rotate(90, expand=True), (12, int((_HEIGHT - _BOTTOM + _TOP) / 2 - width / 2)))
