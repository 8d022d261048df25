"""How families of models write calls of tools, and the grammars of such calls.

A model learns to call tools in the form that its chat template shows it. The form is recognised by the template's text.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from shoal.data import Tokenizer

SPACE = r"( |\n[ \t]{0,40})"
"""White space between two parts of JSON, where there is any. Without a bound a model could write spaces for ever."""
_NO_ARGUMENTS = {"type": "object", "properties": {}, "additionalProperties": False}


class ToolFormat(NamedTuple):
    """The form in which a family of models writes calls."""

    name: str
    mark: str
    """What begins calls. Where it may be missing, an answer that begins with `{` is a call."""
    close: str
    """What ends a call; empty: its last brace does."""
    key: str
    """The name of the field with the arguments."""
    is_marked: bool = True
    """Whether calls always begin with the mark."""
    is_list: bool = False
    """One mark begins all calls, which are a list."""
    takes_several: bool = True
    """Whether the template renders more than one call in a message."""
    id_letters: int = 24
    """Letters of a call's id. Templates of Mistral refuse all but 9."""
    special: Mapping[int, str] = {}
    """Marks that are special tokens, by id: they are no part of decoded text."""

    def symbol(self, text: str) -> str:
        """A mark, as a grammar writes it."""
        found = next((number for number, one in self.special.items() if one == text), None)
        return _quoted(text) if found is None else f"<[{found}]>"


_HERMES = ToolFormat("Hermes", "<tool_call>", "</tool_call>", "arguments")
_MISTRAL = ToolFormat("Mistral", "[TOOL_CALLS]", "", "arguments", is_list=True, id_letters=9)
_LLAMA = ToolFormat("Llama 3", "<|python_tag|>", "", "parameters", is_marked=False, takes_several=False)
_NOTES = {"title", "description", "default", "examples", "deprecated", "$schema", "$comment", "$defs", "definitions"}
"""Keywords of a schema that bound nothing themselves."""
_PLAIN = {"type", "properties", "required", *_NOTES}
"""Keywords of the schema of an object beside which fields that it does not name are not meant."""
_ALTERNATIVES = {"anyOf", "oneOf", "$ref"}
_COMBINING = {"allOf", "not", "if", "then", "else", "dependentSchemas", "dependencies", "unevaluatedProperties", "$dynamicRef"}
"""Keywords by which several schemas bound one object: then a field that one of them does not name may be meant."""
_BY_NAME, _IN_LISTS, _SINGLE = ("properties", "$defs", "definitions"), ("anyOf", "oneOf", "prefixItems"), ("items", "additionalProperties")
"""Keywords whose values have schemas in them."""
_OTHERS = ("<function=", "<arg_key>", "[ARGS]", "[CALL_ID]")
"""Of forms that are like one of these, and are not read: calls in XML, and a name before the arguments."""


class CallableTool(NamedTuple):
    """A tool that an answer may call."""

    name: str
    parameters: Mapping[str, Any]
    """The JSON schema of its arguments."""
    is_strict: bool


def tool_format(tokenizer: Tokenizer) -> ToolFormat | None:
    """The form of calls that a tokenizer's chat template shows; None: it shows none."""
    templates = tokenizer.chat_templates
    text = templates.get("tool_use", templates.get("default", ""))
    if "tools" not in text or any(other in text for other in _OTHERS):
        return None
    for one in (_MISTRAL, _HERMES, _LLAMA):
        if one.mark in text or (one is _LLAMA and '"parameters"' in text and "<|start_header_id|>" in text):
            return one._replace(special=_special(tokenizer, (one.mark, one.close)))
    return None


def _special(tokenizer: Tokenizer, marks: Sequence[str]) -> dict[int, str]:
    encoded = [(mark, tokenizer.encode(mark)) for mark in marks if mark]
    return {ids[0]: mark for mark, ids in encoded if len(ids) == 1 and not tokenizer.decode(ids)}


def calls_grammar(form: ToolFormat, tools: Sequence[CallableTool], *, needs_call: bool, several: bool, answer: str | None = None) -> str:
    """The grammar of an answer that may call tools. `needs_call`: it must; `answer`: what it is instead of calls; None: any text."""
    several = several and form.takes_several
    rules = [*_items(form, tools), *_calls(form, several)]
    if needs_call:
        return _lines("start: calls", *rules)
    if answer is not None:
        return _lines("start: calls | answer", f"answer: {answer}", *rules)
    if not form.is_marked:
        return _lines("start: calls | TEXT", r"TEXT: /([^{ \n](.|\n)*)?/", *rules)
    lazy = "" if form.symbol(form.mark).startswith("<[") else "[lazy]"
    trigger = f"trigger{lazy}: TEXT {form.symbol(form.mark)}"
    start = "start: tag* TEXT" if several and not form.is_list else "start: tag | TEXT"
    return _lines(start, "tag: trigger rest", trigger, r"TEXT: /(.|\n)*/", *rules)


def _items(form: ToolFormat, tools: Sequence[CallableTool]) -> list[str]:
    rules = ["item: " + " | ".join(f"item_{number}" for number in range(len(tools)))]
    for number, tool in enumerate(tools):
        before = _quoted(f'{{"name": {json.dumps(tool.name)}, "{form.key}": ')
        rules += [
            f'item_{number}: {before} arguments_{number} "}}"',
            f"arguments_{number}: {json_rule(tool.parameters, not tool.is_strict)}",
        ]
    return rules


def _calls(form: ToolFormat, several: bool) -> list[str]:
    """The rules for all calls of an answer, and for what follows the first mark."""
    mark = form.symbol(form.mark)
    if form.is_list:
        return [f"calls: {mark} rest", 'rest: " "? "[" item ' + ('("," " "? item)* "]"' if several else '"]"')]
    if form.close:
        more = f'("\\n" {mark} rest)*' if several else ""
        return [f"calls: {mark} rest {more}", f'rest: "\\n" item "\\n" {form.symbol(form.close)}']
    return [f"calls: {mark}? item" if form.special else "calls: item"]


def json_rule(schema: Mapping[str, Any], is_lenient: bool = False) -> str:
    """JSON that fits a schema. `is_lenient`: what llguidance cannot follow in the schema is left out, not refused."""
    return "%json " + json.dumps({**schema, "x-guidance": {"whitespace_pattern": SPACE, "lenient": is_lenient}})


def choice_rule(choices: Sequence[str]) -> str:
    return " | ".join(map(_quoted, choices))


def arguments_schema(parameters: Mapping[str, Any] | None) -> Mapping[str, Any]:
    """The JSON schema of a tool's arguments, which are an object."""
    return _NO_ARGUMENTS if parameters is None else {"type": "object", **parameters}


def closed_schema(schema: Mapping[str, Any]) -> Mapping[str, Any]:
    """The same without fields that the schema of an object allows and does not name, where it names some and needs no others. If several
    schemas bound one object, only the outermost is changed."""
    return _closed(schema) if _is_simple(schema) else _closed_alone(schema)


def _is_simple(schema: Any) -> bool:
    """Whether no two schemas bound the same value."""
    if not isinstance(schema, dict):
        return True
    has_several = bool(schema.keys() & _COMBINING) or (bool(schema.keys() & _ALTERNATIVES) and len(schema.keys() - _NOTES) > 1)
    simple = list[bool]()
    _with_parts(schema, lambda part: simple.append(_is_simple(part)))
    return not has_several and all(simple)


def _closed(schema: Any) -> Any:
    return _closed_alone(_with_parts(schema, _closed)) if isinstance(schema, dict) else schema


def _with_parts(schema: Mapping[str, Any], change: Callable[[Any], Any]) -> dict[str, Any]:
    """The same with the schemas in it changed."""
    found = dict(schema)
    for keyword, value in schema.items():
        if keyword in _BY_NAME and isinstance(value, dict):
            found[keyword] = {name: change(part) for name, part in value.items()}
        elif keyword in _IN_LISTS and isinstance(value, list):
            found[keyword] = [change(part) for part in value]
        elif keyword in _SINGLE:
            found[keyword] = change(value)
    return found


def _closed_alone(schema: Mapping[str, Any]) -> Mapping[str, Any]:
    named, required = schema.get("properties"), schema.get("required", [])
    if not isinstance(named, dict) or not isinstance(required, list) or set(schema) - _PLAIN:
        return schema
    needs_others = any(not isinstance(one, str) or one not in named for one in required)
    return schema if needs_others else {**schema, "additionalProperties": False}


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _lines(*rules: str) -> str:
    return "\n".join(rules) + "\n"
