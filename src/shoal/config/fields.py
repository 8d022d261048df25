"""Sections of the configuration: how they are declared, checked and frozen.

A section is a class with annotated fields and defaults; docstrings say what they mean:

    class Fp8(Section):
        '''8-bit floating point matrix products.'''
        kind: Literal["fp8"] = "fp8"
        margin: NonNegativeInt = 0
        '''Extra powers of two of head-room in the scale.'''

Types are the ordinary ones (`int | None`, `Literal[...]`, `tuple[str, ...]`, `Mapping[str, Host]`, other sections), and a union of
sections is distinguished by `kind`. A check reports every fault with its node; it does not stop at the first.
Why not pydantic: importing its BaseModel alone takes about as long as all of `shoal config check` (`make bench` shows both).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType, NoneType, UnionType
from typing import Annotated, Any, ClassVar, Literal, NamedTuple, Self, Union, dataclass_transform, get_args, get_origin

from shoal.config.text import YamlNode, describe

Tree = YamlNode | dict[str, "Tree"]
Path = tuple[str | int, ...]


class NumberBounds(NamedTuple):
    """Limits of a number."""

    at_least: float | None = None
    above: float | None = None
    at_most: float | None = None
    below: float | None = None

    def __str__(self) -> str:
        words = {"at least": self.at_least, "above": self.above, "at most": self.at_most, "below": self.below}
        return " and ".join(f"{word} {limit:g}" for word, limit in words.items() if limit is not None)

    def hold(self, value: float) -> bool:
        return (
            (self.at_least is None or value >= self.at_least)
            and (self.above is None or value > self.above)
            and (self.at_most is None or value <= self.at_most)
            and (self.below is None or value < self.below)
        )


PositiveInt = Annotated[int, NumberBounds(at_least=1)]
NonNegativeInt = Annotated[int, NumberBounds(at_least=0)]
Port = Annotated[int, NumberBounds(at_least=0, at_most=65535)]
PositiveFloat = Annotated[float, NumberBounds(above=0)]
AtLeastOne = Annotated[float, NumberBounds(at_least=1)]
NonNegativeFloat = Annotated[float, NumberBounds(at_least=0)]
Share = Annotated[float, NumberBounds(at_least=0, at_most=1)]
PositiveShare = Annotated[float, NumberBounds(above=0, at_most=1)]
Decay = Annotated[float, NumberBounds(at_least=0, below=1)]


EMPTY: Mapping[str, Any] = MappingProxyType({})


class Secret:
    """A value that no message, file or log shows."""

    __slots__ = ("_value",)
    MASK: ClassVar[str] = "********"

    def __init__(self, value: str) -> None:
        self._value = value

    def reveal(self) -> str:
        return self._value

    def __repr__(self) -> str:
        return f"Secret({self.MASK!r})"

    def __str__(self) -> str:
        return self.MASK

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Secret) and other._value == self._value

    def __hash__(self) -> int:
        return hash(self._value)


class Fault(NamedTuple):
    """A problem at one place of the tree. `at` is the node; `key` a key of it, if the problem is the key itself."""

    code: str
    message: str
    path: Path
    at: Tree
    key: str | None = None
    help: str = ""


Faults = list[Fault]


MISSING: Any = object()
"""Stands for the default of a required setting."""
INVALID: Any = object()
"""Result of a check that found faults."""


@dataclass_transform(kw_only_default=True, frozen_default=True)
class Section:
    """A frozen group of settings, constructed with keywords. What a user writes is checked first (`SectionType`)."""

    __slots__ = ()
    _fields: ClassVar[dict[str, Field]] = {}
    _declared: ClassVar[dict[str, tuple[Any, Any]]] = {}
    _shorthand: ClassVar[bool] = False
    """Whether `gan` may stand for `{kind: gan}`."""

    def __init_subclass__(cls) -> None:
        declared = dict(cls._declared)
        for name, annotation in cls.__dict__.get("__annotations__", {}).items():  # noqa: RUF063 (inspect takes 5 ms to import)
            if not name.startswith("_") and not _is_class_variable(annotation):
                declared[name] = (annotation, cls.__dict__.get(name, MISSING))
        cls._declared = declared
        cls._fields = {}

    def __init__(self, **values: Any) -> None:
        for name, (_, default) in self._declared.items():  # not `fields()`: most checkers are never needed
            value = values.pop(name, default)
            if value is MISSING:
                raise TypeError(f"{type(self).__name__} needs {name}")
            object.__setattr__(self, name, value)
        if values:
            raise TypeError(f"{type(self).__name__} has no {', '.join(values)}")

    @classmethod
    def fields(cls) -> dict[str, Field]:
        if not cls._fields:
            hints = _hints(cls) if any(isinstance(annotation, str) for annotation, _ in cls._declared.values()) else {}
            cls._fields = {
                name: Field(checker_of(hints.get(name, annotation)), default) for name, (annotation, default) in cls._declared.items()
            }
        return cls._fields

    @classmethod
    def checker(cls) -> Checker:
        """The checker for a setting of this type."""
        return SectionType(cls)

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError(f"a loaded configuration does not change; use replace({name}=…)")

    def __delattr__(self, name: str) -> None:
        raise AttributeError("a loaded configuration does not change")

    def __eq__(self, other: object) -> bool:
        return type(other) is type(self) and all(getattr(self, name) == getattr(other, name) for name in self.fields())

    def __hash__(self) -> int:
        return hash((type(self), repr(self)))

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(f'{name}={getattr(self, name)!r}' for name in self.fields())})"

    def replace(self, **changes: Any) -> Self:
        return type(self)(**{name: getattr(self, name) for name in self.fields()} | changes)


def _is_class_variable(annotation: Any) -> bool:
    """Whether an annotation is a ClassVar, which is no setting."""
    return (
        annotation.startswith("ClassVar") if isinstance(annotation, str) else annotation is ClassVar or get_origin(annotation) is ClassVar
    )


def _hints(section: type[Section]) -> dict[str, Any]:
    """The types of a section whose module writes annotations as text (`from __future__ import annotations`)."""
    from typing import get_type_hints

    try:
        return get_type_hints(section, include_extras=True)
    except NameError as error:
        raise TypeError(f"the types of {section.__module__}.{section.__name__} cannot be found: {error}") from None


class Field(NamedTuple):
    """The type and the default of one setting."""

    checker: Checker
    default: Any


def shorthand_of(value: object) -> str | None:
    """The kind of a section that can be written as its kind alone; None if it has settings."""
    return getattr(value, "kind", None) if isinstance(value, Section) and value._shorthand and len(value._declared) == 1 else None


def as_data(value: object, *, mask: str | None = Secret.MASK) -> Any:
    """Plain data for YAML or JSON; a secret becomes `mask`."""
    if isinstance(value, Section):
        return shorthand_of(value) or {name: as_data(getattr(value, name), mask=mask) for name in value.fields()}
    if isinstance(value, Mapping):
        return {key: as_data(item, mask=mask) for key, item in value.items()}
    if isinstance(value, tuple):
        return [as_data(item, mask=mask) for item in value]
    return mask if isinstance(value, Secret) else value


# --- checkers: one for each form of type --------------------------------------------------------------------------------


class Checker:
    """Checks a tree: returns the frozen value, or adds to `faults` and returns INVALID. `expected` completes "expected …"."""

    @property
    def expected(self) -> str:
        return "a value"

    def check(self, tree: Tree, path: Path, faults: Faults) -> Any:
        raise NotImplementedError  # abstract

    def wrong(self, tree: Tree, path: Path, faults: Faults, help: str = "") -> Any:
        found = describe(tree.value if isinstance(tree, YamlNode) else tree)
        faults.append(Fault("wrong-type", f"expected {self.expected}, found {found}", path, tree, help=help))
        return INVALID

    def sections(self) -> Iterator[type[Section]]:
        """The sections that a value of this type can have."""
        return iter(())


class AnyType(Checker):
    def check(self, tree: Tree, path: Path, faults: Faults) -> Any:
        if isinstance(tree, dict):
            return MappingProxyType({key: self.check(item, (*path, key), faults) for key, item in tree.items()})
        if isinstance(tree.value, dict):
            return MappingProxyType({key: self.check(entry.value, (*path, key), faults) for key, entry in tree.value.items()})
        if isinstance(tree.value, list):
            return tuple(self.check(item, (*path, i), faults) for i, item in enumerate(tree.value))
        return tree.value


class BoolType(Checker):
    expected = "true or false"
    WORDS: ClassVar[dict[str, str]] = {"yes": "true", "on": "true", "y": "true", "no": "false", "off": "false", "n": "false"}

    def check(self, tree: Tree, path: Path, faults: Faults) -> Any:
        if isinstance(tree, YamlNode) and isinstance(tree.value, bool):
            return tree.value
        word = self.WORDS.get(tree.value.lower()) if isinstance(tree, YamlNode) and isinstance(tree.value, str) else None
        return self.wrong(tree, path, faults, f"write `{word}`" if word else "")


class SwitchType(BoolType):
    """True, false, or the word for a choice that Shoal makes."""

    def __init__(self, word: str) -> None:
        self.word, self.expected = word, f"true, false or `{word}`"

    def check(self, tree: Tree, path: Path, faults: Faults) -> Any:
        value = tree.value if isinstance(tree, YamlNode) else tree
        return value if isinstance(value, str) and value == self.word else super().check(tree, path, faults)


class NumberType(Checker):
    expected = "a number"

    def __init__(self, whole: bool, bounds: NumberBounds) -> None:
        self.whole = whole
        self.bounds = bounds
        kind = "a whole number" if whole else "a number"
        self.expected = f"{kind} {bounds}".rstrip() if any(limit is not None for limit in bounds) else kind

    def check(self, tree: Tree, path: Path, faults: Faults) -> Any:
        value = tree.value if isinstance(tree, YamlNode) else tree
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            return self.wrong(tree, path, faults, self.hint(value))
        if not math.isfinite(value) or (self.whole and value != int(value)):
            return self.wrong(tree, path, faults)
        if not self.bounds.hold(value):
            faults.append(Fault("out-of-range", f"expected {self.expected}, found {describe(value)}", path, tree))
            return INVALID
        return int(value) if self.whole else float(value)

    @staticmethod
    def hint(value: object) -> str:
        """A hint for text that looks like a number."""
        if not isinstance(value, str) or not value.isascii():
            return ""
        digits = value.replace("_", "")
        plain = digits.lstrip("+-").replace(".", "", 1).isdigit()
        if plain and "_" in value:
            return f"YAML has no `_` in numbers: write {digits}"
        if plain and digits.lstrip("+-").isdigit() and digits.lstrip("+-").startswith("0"):
            octal = f", or 0o{digits.lstrip('+-0') or '0'} if you mean octal" if not set(digits) & {"8", "9"} else ""
            return f"a leading zero is ambiguous: write {digits.lstrip('+-0') or '0'}{octal}"
        return "write the number without quotes" if plain else ""


class NumberOrWordType(NumberType):
    """A number, or the word for one that Shoal chooses."""

    def __init__(self, number: NumberType, word: str) -> None:
        super().__init__(number.whole, number.bounds)
        self.word, self.expected = word, f"{number.expected}, or `{word}`"

    def check(self, tree: Tree, path: Path, faults: Faults) -> Any:
        value = tree.value if isinstance(tree, YamlNode) else tree
        return value if isinstance(value, str) and value == self.word else super().check(tree, path, faults)


class TextType(Checker):
    expected = "text"

    def check(self, tree: Tree, path: Path, faults: Faults) -> Any:
        if isinstance(tree, YamlNode) and isinstance(tree.value, str):
            return tree.value
        if isinstance(tree, YamlNode) and tree.plain and tree.raw is not None and not isinstance(tree.value, (dict, list)):
            return self.wrong(tree, path, faults, f'to mean the text, quote it: "{tree.raw}"' if tree.raw else "")
        return self.wrong(tree, path, faults)


class SecretType(Checker):
    expected = "text (a secret)"

    def check(self, tree: Tree, path: Path, faults: Faults) -> Any:
        value = tree.value if isinstance(tree, YamlNode) else tree
        if isinstance(value, str):
            return Secret(value)
        if isinstance(value, int) and not isinstance(value, bool) and isinstance(tree, YamlNode):
            return Secret(tree.raw if tree.raw and "${" not in tree.raw else str(value))  # a password of digits
        faults.append(Fault("wrong-type", f"expected {self.expected}, found {type(value).__name__}", path, tree))
        return INVALID


class ChoiceType(Checker):
    expected = "a choice"

    def __init__(self, choices: tuple[Any, ...]) -> None:
        self.choices = choices
        self.expected = choices[0] if len(choices) == 1 else "one of " + ", ".join(f"`{choice}`" for choice in choices)

    def check(self, tree: Tree, path: Path, faults: Faults) -> Any:
        value = tree.value if isinstance(tree, YamlNode) else tree
        if not isinstance(value, bool) and value in self.choices if isinstance(value, (str, int)) else False:
            return value
        if isinstance(value, str):
            help = did_you_mean(value, self.choices)
            faults.append(Fault("unknown-choice", f"{describe(value)} is not {self.expected}", path, tree, help=help))
            return INVALID
        return self.wrong(tree, path, faults)


class _ContainerType(Checker):
    """A type whose values hold values of another type."""

    def __init__(self, item: Checker) -> None:
        self.item = item

    def sections(self) -> Iterator[type[Section]]:
        return self.item.sections()


class ListType(_ContainerType):
    @property
    def expected(self) -> str:
        return f"a list (each {self.item.expected})"

    def check(self, tree: Tree, path: Path, faults: Faults) -> Any:
        if not isinstance(tree, YamlNode) or not isinstance(tree.value, list):
            return self.wrong(tree, path, faults)
        items = tuple(self.item.check(item, (*path, i), faults) for i, item in enumerate(tree.value))
        return INVALID if any(item is INVALID for item in items) else items


class MappingType(_ContainerType):
    expected = "a mapping"

    def check(self, tree: Tree, path: Path, faults: Faults) -> Any:
        entries = entries_of(tree)
        if entries is None:
            return self.wrong(tree, path, faults)
        items = {key: self.item.check(item, (*path, key), faults) for key, item in entries.items()}
        return INVALID if any(item is INVALID for item in items.values()) else MappingProxyType(items)


class OptionalType(_ContainerType):
    @property
    def expected(self) -> str:
        return f"{self.item.expected}, or null"

    def check(self, tree: Tree, path: Path, faults: Faults) -> Any:
        if isinstance(tree, YamlNode) and tree.value is None:
            return None
        return self.item.check(tree, path, faults)


class SectionType(Checker):
    expected = "a mapping"

    def __init__(self, section: type[Section]) -> None:
        self.section = section

    def check(self, tree: Tree, path: Path, faults: Faults) -> Any:
        entries = {} if isinstance(tree, YamlNode) and tree.value is None else entries_of(tree)
        if entries is None:
            return self.wrong(tree, path, faults)
        fields = self.section.fields()
        values: dict[str, Any] = {}
        for name, field in fields.items():
            if name in entries:
                values[name] = field.checker.check(entries[name], (*path, name), faults)
            elif field.default is MISSING:
                faults.append(Fault("missing-key", f"`{name}` is required here", (*path, name), tree))
                values[name] = INVALID
        unknown = [name for name in entries if name not in fields]
        faults += [self.unknown(name, path, tree) for name in unknown]
        return INVALID if unknown or any(value is INVALID for value in values.values()) else self.section(**values)

    def unknown(self, name: str, path: Path, tree: Tree) -> Fault:
        where, help = ".".join(map(str, path)) or "the configuration", did_you_mean(name, self.section.fields())
        return Fault("unknown-key", f"unknown key `{name}` in {where}", (*path, name), tree, key=name, help=help)

    def sections(self) -> Iterator[type[Section]]:
        yield self.section


class TaggedType(Checker):
    """A union of sections, chosen by `kind`. Plugins add to `kinds`."""

    def __init__(self, kinds: Mapping[str, type[Section]], shorthand: bool = False, open: bool = False) -> None:
        """`shorthand`: a kind alone may stand for `{kind: …}`. `open`: plugins may add kinds."""
        self.kinds, self.shorthand, self.open = kinds, shorthand, open

    @property
    def expected(self) -> str:
        if self.shorthand:
            return f"one of {', '.join(f'`{kind}`' for kind in self.kinds)}, or a mapping with such a `kind`"
        return f"a mapping with a `kind`: {', '.join(self.kinds)}"

    def check(self, tree: Tree, path: Path, faults: Faults) -> Any:
        entries = entries_of(tree)
        if entries is None and self.shorthand and isinstance(tree, YamlNode) and isinstance(tree.value, str):
            entries = {"kind": tree}
        if entries is None:
            kind = tree.value if isinstance(tree, YamlNode) else None
            return self.wrong(tree, path, faults, f"write `{{kind: {kind}}}`" if isinstance(kind, str) and kind in self.kinds else "")
        kind = entries.get("kind")
        if kind is None:
            faults.append(Fault("missing-key", f"`kind` is required here, one of {', '.join(self.kinds)}", (*path, "kind"), tree))
            return INVALID
        chosen = ChoiceType(tuple(self.kinds)).check(kind, (*path, "kind"), faults)
        if chosen is INVALID:
            if not faults[-1].help:
                help = self.choice_within(kind) or ("where a plugin has it, name the plugin: --plugin FILE" if self.open else "")
                faults[-1] = faults[-1]._replace(help=help)
            return INVALID
        start = len(faults)
        value = SectionType(self.kinds[chosen]).check(tree if entries_of(tree) is not None else entries, path, faults)
        for i in range(start, len(faults)):
            faults[i] = self.elsewhere(faults[i], chosen, len(path))
        return value

    def choice_within(self, kind: Tree) -> str:
        """A hint where an unknown kind is a choice of one setting of another kind, as `kto` is a loss of `dpo`."""
        word = kind.value if isinstance(kind, YamlNode) else kind
        found = [
            f"write `{{kind: {one}, {name}: {word}}}`"
            for one, section in self.kinds.items()
            for name, field in section.fields().items()
            if isinstance(field.checker, ChoiceType) and name != "kind" and isinstance(word, str) and word in field.checker.choices
        ]
        return found[0] if len(found) == 1 else ""

    def elsewhere(self, fault: Fault, chosen: str, depth: int) -> Fault:
        """Improve the help of an unknown key that belongs to another kind."""
        if fault.code != "unknown-key" or len(fault.path) != depth + 1:
            return fault
        others = [f"`{kind}`" for kind, section in self.kinds.items() if fault.key in section.fields()]
        help = f"it is a setting of kind {' and '.join(others)}; this is kind `{chosen}`" if others else fault.help
        return fault._replace(message=f"{fault.message} (kind {chosen})", help=help)

    def sections(self) -> Iterator[type[Section]]:
        return iter(self.kinds.values())


def kind_of(section: type[Section]) -> str:
    """The `kind` by which a section of a union is chosen."""
    kind = section._declared.get("kind", (None, None))[1]
    if not isinstance(kind, str):
        raise TypeError(f'{section.__module__}.{section.__name__} has no kind to be chosen by: write kind: Literal["name"] = "name"')
    return kind


def entries_of(tree: Tree) -> dict[str, Tree] | None:
    """The keys and values of a tree that is a mapping."""
    if isinstance(tree, dict):
        return tree
    if isinstance(tree.value, dict):
        return {key: entry.value for key, entry in tree.value.items()}
    return None


def did_you_mean(word: str, choices: Any, template: str = "did you mean `{}`?") -> str:
    from difflib import get_close_matches

    words = {str(choice).lower(): str(choice) for choice in choices}
    close = get_close_matches(word.lower().replace("-", "_"), words, 1, 0.6) or get_close_matches(word.lower(), words, 1, 0.6)
    return template.format(words[close[0]]) if close else ""


_PLAIN: dict[Any, Callable[[], Checker]] = {Any: AnyType, bool: BoolType, str: TextType, Secret: SecretType}


def checker_of(annotation: Any) -> Checker:
    """The checker for a type annotation."""
    if annotation in _PLAIN:
        return _PLAIN[annotation]()
    if annotation in (int, float):
        return NumberType(annotation is int, NumberBounds())
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return NumberType(arguments[0] is int, arguments[1])
    if origin is Literal:
        return ChoiceType(arguments)
    if origin is tuple:
        return ListType(checker_of(arguments[0]))
    if origin is Mapping:
        return MappingType(checker_of(arguments[1]))
    if origin in (Union, UnionType):
        rest = tuple(argument for argument in arguments if argument is not NoneType)
        if rest[0] is bool and len(rest) == 2:
            return SwitchType(get_args(rest[1])[0])
        if len(rest) == 2 and get_origin(rest[1]) is Literal and isinstance(number := checker_of(rest[0]), NumberType):
            return NumberOrWordType(number, get_args(rest[1])[0])
        inner = TaggedType({kind_of(section): section for section in rest}) if len(rest) > 1 else checker_of(rest[0])
        return OptionalType(inner) if len(rest) < len(arguments) else inner
    if isinstance(annotation, type) and issubclass(annotation, Section):
        return annotation.checker()
    raise TypeError(f"no checker for {annotation!r}")
