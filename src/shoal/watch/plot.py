"""Curves as a PNG, drawn with Pillow: a plotting library would be the largest thing installed."""

from __future__ import annotations

from pathlib import Path

_WIDTH, _HEIGHT, _MARGIN = 800, 450, 60
_COLOURS = ("#1f77b4", "#d62728", "#2ca02c", "#9467bd", "#ff7f0e", "#17becf")

Points = list[tuple[float, float]]


def save_curves(curves: dict[str, Points], path: Path) -> None:
    """Draw curves over steps, with axes and a legend."""
    from PIL import Image, ImageDraw

    image = Image.new("RGB", (_WIDTH, _HEIGHT), "white")
    draw = ImageDraw.Draw(image)
    points = [point for curve in curves.values() for point in curve]
    (low_x, high_x), (low_y, high_y) = (_range([point[axis] for point in points]) for axis in (0, 1))

    def place(point: tuple[float, float]) -> tuple[float, float]:
        x = _MARGIN + (point[0] - low_x) / (high_x - low_x) * (_WIDTH - 2 * _MARGIN)
        y = _HEIGHT - _MARGIN - (point[1] - low_y) / (high_y - low_y) * (_HEIGHT - 2 * _MARGIN)
        return x, y

    for part in range(5):
        value = low_y + (high_y - low_y) * part / 4
        left, y = place((low_x, value))
        draw.line([(left, y), (_WIDTH - _MARGIN, y)], fill="#e5e5e5")
        draw.text((8, y - 6), f"{value:.3g}", fill="black")
        x, bottom = place((low_x + (high_x - low_x) * part / 4, low_y))
        draw.text((x - 10, bottom + 8), f"{low_x + (high_x - low_x) * part / 4:.0f}", fill="black")
    for number, (name, curve) in enumerate(curves.items()):
        colour = _COLOURS[number % len(_COLOURS)]
        places = [place(point) for point in curve]
        draw.line(places, fill=colour, width=2) if len(places) > 1 else draw.point(places, fill=colour)
        draw.text((_WIDTH - 240, 12 + 14 * number), f"— {name}", fill=colour)
    image.save(path)


def _range(values: list[float]) -> tuple[float, float]:
    low, high = min(values), max(values)
    return (low, high) if high > low else (low - 0.5, high + 0.5)
