"""Parts: sections with several kinds, to which plugins can add. There is a family for models, one for tasks, one for codecs …

A family is a class of settings; each kind is a subclass:

    class Codec(Part):
        '''How an update travels.'''

    class Fp16Codec(Codec, built_by="shoal.updates.codecs.dense:blockwise"):
        '''16-bit floats: half the bytes.'''
        kind: Literal["fp16"] = "fp16"

Defining the class registers the kind. `built_by` names the function or class that builds the part; it is imported when it is first needed,
so that the configuration imports no torch. Class variables of the family say what a part needs. A plugin uses `@builds(Fp16Codec)` instead.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from importlib import import_module
from typing import Any, ClassVar, TypeVar

from shoal.config.fields import Checker, Section, SectionType, TaggedType, kind_of
from shoal.errors import ShoalError

Built = TypeVar("Built")
FAMILIES: dict[str, type[Part]] = {}


class Part(Section):
    """The settings of a part. A family is a direct subclass; a kind is a subclass of a family."""

    kind: str
    kinds: ClassVar[dict[str, Any]] = {}
    """The kinds of this family, by name."""
    noun: ClassVar[str] = "part"
    """Name of the family in messages."""
    made_by: ClassVar[Any] = None
    """The builder: `module:name`, `module`, or the function or class itself; None until @builds sets it."""

    def __init_subclass__(cls, *, built_by: str | None = None, noun: str = "", shorthand: bool = False, shared: bool = False) -> None:
        """`noun` and `shorthand` are for families: the name in messages, and whether a kind alone may stand for `{kind: …}`.
        `shared`: this class is a base of several kinds and no kind itself."""
        super().__init_subclass__()
        if Part in cls.__bases__:
            cls.kinds, cls.noun, cls._shorthand = {}, noun, shorthand
            FAMILIES[noun] = cls
            return
        if shared:
            return
        cls.made_by = built_by
        kind = kind_of(cls)
        if kind in cls.kinds:
            raise ShoalError(
                f"there are two parts of one name: the {cls.noun} `{kind}` is at {source_location(cls.kinds[kind])} "
                f"and at {source_location(cls)}; rename one of them"
            )
        cls.kinds[kind] = cls

    @classmethod
    def checker(cls) -> Checker:
        return TaggedType(cls.kinds, cls._shorthand, open=True) if Part in cls.__bases__ else SectionType(cls)

    @classmethod
    def builder(cls) -> Any:
        """The builder of this kind. Raises ShoalError if it has none."""
        if cls.made_by is None:
            raise ShoalError(
                f"nothing makes the {cls.noun} `{kind_of(cls)}` ({source_location(cls)}): decorate a function or a class with "
                f"@builds({cls.__name__}), or name one with built_by="
            )
        if isinstance(cls.made_by, str):
            module, _, name = cls.made_by.partition(":")
            found = import_module(module)
            cls.made_by = getattr(found, name) if name else found
        return cls.made_by


def builds(settings: type[Part]) -> Callable[[Built], Built]:
    """Decorator: the function or class builds the part with these settings."""

    def register(made_by: Built) -> Built:
        if settings.made_by is not None:
            raise ShoalError(f"the {settings.noun} `{kind_of(settings)}` ({source_location(settings)}) has two builders; keep one of them")
        settings.made_by = made_by
        return made_by

    return register


def source_location(part: type[Part]) -> str:
    """The file and line where a part's settings are declared."""
    import inspect

    try:
        return f"{inspect.getsourcefile(part)}:{inspect.getsourcelines(part)[1]}"
    except (OSError, TypeError):
        return part.__module__


def used_by(value: object) -> Iterator[type[Part]]:
    """The kinds of all parts that these settings choose."""
    if isinstance(value, Part):
        yield type(value)
    below = [getattr(value, name) for name in value.fields()] if isinstance(value, Section) else []
    items = value if isinstance(value, tuple) else value.values() if hasattr(value, "values") and not isinstance(value, Section) else below
    for item in items:
        yield from used_by(item)
