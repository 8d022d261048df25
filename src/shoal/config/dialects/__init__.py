"""The dialects, and detection of a file's dialect."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

from shoal.config.dialects.ava import AVA
from shoal.config.dialects.classroom import CLASSROOM
from shoal.config.dialects.diloco import DILOCO
from shoal.config.dialects.dist_llm_train import DIST_LLM_TRAIN
from shoal.config.dialects.smolcluster import SMOLCLUSTER
from shoal.config.dialects.table import Dialect
from shoal.config.fields import ListType, MappingType, OptionalType, Section, SectionType, TaggedType
from shoal.config.layers import Key
from shoal.config.schema import Run
from shoal.config.text import YamlNode

DIALECTS: dict[str, Dialect] = {dialect.name: dialect for dialect in (CLASSROOM, SMOLCLUSTER, DIST_LLM_TRAIN, DILOCO, AVA)}
NATIVE = "shoal"
NAMES = (*DIALECTS, NATIVE)


def candidates(root: YamlNode) -> list[str]:
    """The dialects that know the most keys of a file; several if they tie."""
    keys = list(_keys(root, ()))
    known = {name: sum(dialect.knows(key) for key in keys) for name, dialect in DIALECTS.items()}
    known[NATIVE] = sum(native_knows(key) for key in keys)
    most = max(known.values())
    return [name for name, count in known.items() if count == most] if most else [NATIVE]


def native_knows(path: Key) -> bool:
    """Whether this is a path of the schema, for any choice of kinds."""
    return _knows(SectionType(Run), path)


def native_paths() -> list[str]:
    """Every path of the schema, for all kinds, without repetition."""
    return list(dict.fromkeys(_paths(Run, "")))


def _keys(node: YamlNode, path: Key) -> Iterator[Key]:
    for name, entry in node.value.items():
        here = (*path, name)
        if isinstance(entry.value.value, dict) and entry.value.value:
            yield from _keys(entry.value, here)
        elif isinstance(entry.value.value, list) and any(isinstance(item.value, dict) for item in entry.value.value):
            yield from (key for item in entry.value.value if isinstance(item.value, dict) for key in _keys(item, here))
        else:
            yield here


def _knows(checker: object, path: Key) -> bool:
    if not path:
        return True
    if isinstance(checker, (OptionalType, ListType)):
        return _knows(checker.item, path)
    if isinstance(checker, MappingType):
        return _knows(checker.item, path[1:])
    if isinstance(checker, (SectionType, TaggedType)):
        return any(path[0] in section.fields() and _knows(section.fields()[path[0]].checker, path[1:]) for section in checker.sections())
    return False


def _paths(section: type[Section], prefix: str) -> Iterator[str]:
    for name, field in section.fields().items():
        checker = field.checker.item if isinstance(field.checker, OptionalType) else field.checker
        inner = list(checker.sections()) if isinstance(checker, (SectionType, TaggedType)) else []
        for below in inner:
            yield from _paths(below, f"{prefix}{name}.")
        if not inner:
            yield f"{prefix}{name}"


def in_words_of(dialects: Iterable[str], text: str) -> str:
    """A message with the settings in it renamed to the keys of these dialects."""
    names: dict[str, set[str]] = {}
    for entry in (entry for name in dialects if name in DIALECTS for entry in DIALECTS[name].rows):
        for target in entry.to:
            names.setdefault(re.sub(r"\[[^\]]*\]", "", target), set()).add(entry.path)
    own = {native: spelled.pop() for native, spelled in names.items() if len(spelled) == 1 and "*" not in native and "{" not in native}
    return re.sub(r"[a-z_]+(?:\.[a-z_0-9]+)+", lambda found: own.get(found[0], found[0]), text)
