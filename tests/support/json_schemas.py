"""Random JSON schemas whose answers have a bounded length, as the fields of real ones have."""

from __future__ import annotations

import random
from typing import Any

_WORDS = ("name", "age", "size", "tags", "city", "unit", "items", "kind", "note", "x", "y")


def random_schema(draw: random.Random, depth: int = 0) -> dict[str, Any]:
    """A schema of an object, an array, a number, a text, a choice or a constant; texts and arrays have a longest length."""
    kinds = ("text", "integer", "number", "boolean", "null", "enum", "const", "pattern")
    kind = draw.choice(kinds) if depth > 2 else draw.choice((*kinds, "object", "object", "array", "any")) if depth else "object"
    return _MAKERS[kind](draw, depth)


def _object(draw: random.Random, depth: int) -> dict[str, Any]:
    names = draw.sample(_WORDS, draw.randint(1, 4))
    properties = {name: random_schema(draw, depth + 1) for name in names}
    required = [name for name in names if draw.random() < 0.7]
    return {"type": "object", "properties": properties, "required": required, "additionalProperties": False}


def _array(draw: random.Random, depth: int) -> dict[str, Any]:
    least = draw.randint(0, 2)
    return {"type": "array", "items": random_schema(draw, depth + 1), "minItems": least, "maxItems": least + draw.randint(0, 2)}


def _bounded(draw: random.Random, depth: int) -> dict[str, Any]:
    least = draw.randint(-200, 200)
    return {"type": "integer", "minimum": least, "maximum": least + draw.randint(0, 1000)}


_MAKERS: dict[str, Any] = {
    "text": lambda draw, depth: {"type": "string", "minLength": draw.randint(0, 3), "maxLength": draw.randint(3, 12)},
    "integer": _bounded,
    "number": lambda draw, depth: {"type": "number", "multipleOf": 0.5, "minimum": 0, "maximum": 100},
    "boolean": lambda draw, depth: {"type": "boolean"},
    "null": lambda draw, depth: {"type": "null"},
    "enum": lambda draw, depth: {"enum": draw.sample(["red", "green", 1, 2.5, None, True, "blue"], draw.randint(1, 4))},
    "const": lambda draw, depth: {"const": draw.choice(["fixed", 7, False])},
    "pattern": lambda draw, depth: {"type": "string", "pattern": draw.choice(["^[a-f]{2,5}$", "^(ab|cd)+x$"]), "maxLength": 9},
    "object": _object,
    "array": _array,
    "any": lambda draw, depth: {"anyOf": [random_schema(draw, depth + 1) for _ in range(draw.randint(2, 3))]},
}
