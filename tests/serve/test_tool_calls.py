"""Calls of tools in the forms of several families, as the openai client sees them, and answers in a format."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import jsonschema
import pytest

pytest.importorskip("openai")
pytest.importorskip("llguidance", reason="answers by a grammar need llguidance: pip install 'shoal[serve]'")

import openai

from shoal.data import StreamedText, Tokenizer, load_tokenizer
from shoal.serve.constraints import GrammarCompiler
from shoal.serve.tool_formats import CallableTool, calls_grammar, closed_schema, json_rule, tool_format
from shoal.serve.tool_parser import MarkedText, ToolCallParser
from tests.serve.test_api import url
from tests.support.chat_folders import QWEN25, write_tokenizer
from tests.support.json_schemas import random_schema
from tests.support.small_service import running, small_served_with_tools

LLAMA31 = """{{- bos_token }}
{%- if tools is not none %}
    {{- '<|start_header_id|>system<|end_header_id|>\\n\\nRespond in the format {"name": function name, "parameters": dictionary}.\\n' }}
    {%- for tool in tools %}
        {{- tool | tojson(indent=4) + '\\n' }}
    {%- endfor %}
    {{- '<|eot_id|>' }}
{%- endif %}
{%- for message in messages %}
    {%- if message.tool_calls %}
        {%- if message.tool_calls | length != 1 %}
            {{- raise_exception('This model only supports single tool-calls at once!') }}
        {%- endif %}
        {%- set call = message.tool_calls[0].function %}
        {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n{"name": "' + call.name + '", "parameters": ' }}
        {{- call.arguments | tojson + '}<|eot_id|>' }}
    {%- elif message.role == 'tool' %}
        {{- '<|start_header_id|>ipython<|end_header_id|>\\n\\n' + message.content | tojson + '<|eot_id|>' }}
    {%- else %}
        {{- '<|start_header_id|>' + message.role + '<|end_header_id|>\\n\\n' + message.content | trim + '<|eot_id|>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
{%- endif %}
"""
MISTRAL = """{%- for message in messages %}
    {%- if message.role == 'user' %}
        {%- if tools is not none and loop.last %}
            {{- '[AVAILABLE_TOOLS] ' + tools | tojson + '[/AVAILABLE_TOOLS]' }}
        {%- endif %}
        {{- '[INST] ' + message.content + '[/INST]' }}
    {%- elif message.tool_calls %}
        {{- '[TOOL_CALLS] [' }}
        {%- for call in message.tool_calls %}
            {%- if call.id | length != 9 %}
                {{- raise_exception('Tool call IDs should be alphanumeric strings with length 9!') }}
            {%- endif %}
            {{- (call.function | tojson)[:-1] + ', "id": "' + call.id + '"}' + (']' + eos_token if loop.last else ', ') }}
        {%- endfor %}
    {%- elif message.role == 'tool' %}
        {{- '[TOOL_RESULTS] {"content": ' + message.content | tojson + ', "call_id": "' + message.tool_call_id + '"}[/TOOL_RESULTS]' }}
    {%- else %}
        {{- ' ' + message.content + eos_token }}
    {%- endif %}
{%- endfor %}
"""
FORMS = {"hermes": ("qwen25", QWEN25), "llama": ("llama3", LLAMA31), "mistral": ("chatml", MISTRAL)}
WEATHER = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 8}, "days": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["city"],
    "additionalProperties": False,
}
TOOLS = [
    {"type": "function", "function": {"name": "weather", "description": "Tells the weather.", "parameters": WEATHER, "strict": True}},
    {"type": "function", "function": {"name": "now"}},
]
ASK: dict[str, Any] = {"model": "tiny", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 300, "seed": 5}


def tokenizer_of(folder: Path, form: str, marks: Sequence[str] = ()) -> Tokenizer:
    """`marks`: further special tokens, which the template names."""
    family, template = FORMS[form]
    write_tokenizer(folder, family, template=template + "{# " + " ".join(marks) + " #}")
    if form == "mistral" or marks:
        from tokenizers import Tokenizer as Library

        made = Library.from_file(str(folder / "tokenizer.json"))
        made.add_special_tokens([*marks] or ["[TOOL_CALLS]"])
        made.save(str(folder / "tokenizer.json"))
    return load_tokenizer(str(folder))


@pytest.fixture(scope="module", params=FORMS)
def client(request, tmp_path_factory) -> Iterator[Any]:
    tokenizer = tokenizer_of(tmp_path_factory.mktemp("model"), request.param)
    with running(small_served_with_tools(tokenizer, 2048)) as service:
        one = openai.OpenAI(base_url=f"{url(service)}/v1", api_key="none", max_retries=0)
        one.marks = [*tool_format(tokenizer).special]
        yield one


def joined(stream: Any) -> tuple[str, list[dict[str, str]], str]:
    """Words, calls and reason of a stream, as agents join them."""
    words, calls, reason = "", list[dict[str, str]](), ""
    for chunk in stream:
        choice = chunk.choices[0]
        words += choice.delta.content or ""
        assert not (choice.finish_reason and (choice.delta.content or choice.delta.tool_calls)), "the reason comes by itself"
        reason = choice.finish_reason or reason
        for piece in choice.delta.tool_calls or ():
            assert choice.delta.content is None
            if piece.id is not None:
                assert piece.index == len(calls)
                assert piece.type == "function"
                calls.append({"id": piece.id, "name": piece.function.name, "arguments": ""})
            calls[piece.index]["arguments"] += piece.function.arguments
    return words, calls, reason


@pytest.mark.parametrize("choice", ["required", "weather"])
def test_a_forced_call_fits_its_schema_and_goes_back_into_the_conversation(client, choice):
    named: Any = choice if choice == "required" else {"type": "function", "function": {"name": choice}}
    asked = {**ASK, "tools": TOOLS, "tool_choice": named, "parallel_tool_calls": False}
    answer = client.chat.completions.create(**asked).choices[0]
    assert answer.finish_reason == "tool_calls"
    assert not answer.message.content
    (call,) = answer.message.tool_calls
    assert call.function.name in (["weather"] if choice != "required" else ["weather", "now"])
    jsonschema.validate(json.loads(call.function.arguments), WEATHER if call.function.name == "weather" else {"maxProperties": 0})
    words, calls, reason = joined(
        client.chat.completions.create(**ASK, tools=TOOLS, tool_choice=named, parallel_tool_calls=False, stream=True)
    )
    assert (words, [(one["name"], one["arguments"]) for one in calls], reason) == (
        "",
        [(call.function.name, call.function.arguments)],
        "tool_calls",
    )
    history = [*ASK["messages"], answer.message.model_dump(), {"role": "tool", "tool_call_id": call.id, "content": "sunny"}]
    assert client.chat.completions.create(**ASK | {"messages": history, "max_tokens": 4}, tools=TOOLS, tool_choice="none").usage


def test_answers_in_a_format_are_valid_and_end_by_themselves(client):
    draw = random.Random(4)
    for number in range(4):
        content = random_schema(draw)
        named = {"type": "json_schema", "json_schema": {"name": "n", "schema": content, "strict": True}}
        asked = ASK | {"max_tokens": 1500, "seed": number, "n": 2}
        for choice in client.chat.completions.create(**asked, response_format=named).choices:
            assert choice.finish_reason == "stop"
            jsonschema.validate(json.loads(choice.message.content), content)
    (choice,) = client.chat.completions.create(**ASK, extra_body={"guided_choice": ['y"es\n', "né"]}).choices
    assert choice.message.content in ('y"es\n', "né")
    (choice,) = client.chat.completions.create(**ASK, extra_body={"guided_regex": "[0-9]{3}-[a-c/]{2}"}).choices
    assert (len(choice.message.content), choice.message.content[3]) == (6, "-")
    assert client.completions.create(model="tiny", prompt=["a", "b"], extra_body={"grammar": 'start: "x" "y"'}).choices[1].text == "xy"


def test_a_format_beside_tools_is_for_answers_without_a_call(client):
    content = {"type": "object", "properties": {"x": {"type": "boolean"}}, "required": ["x"], "additionalProperties": False}
    format = {"type": "json_schema", "json_schema": {"name": "n", "schema": content}}
    seen = set()
    for seed in range(5):
        answer = client.chat.completions.create(**ASK | {"seed": seed}, tools=TOOLS, response_format=format).choices[0]
        seen.add(answer.finish_reason)
        if answer.finish_reason == "stop":
            jsonschema.validate(json.loads(answer.message.content), content)
    assert seen <= {"stop", "tool_calls", "length"}
    assert "stop" in seen or "tool_calls" in seen


def test_what_an_answer_cannot_be_is_refused_with_its_parameter(client):
    def refused(**fields: Any) -> Any:
        with pytest.raises(openai.BadRequestError) as error:
            client.chat.completions.create(**ASK, **fields)
        return error.value.param

    assert refused(tools=TOOLS, tool_choice={"type": "function", "function": {"name": "other"}}) == "tool_choice"
    assert refused(tools=[*TOOLS, TOOLS[0]]) == "tools"
    assert refused(tools=TOOLS, tool_choice="required", extra_body={"guided_regex": "a"}) == "guided_regex"
    wrong = {"name": "f", "parameters": {"type": "array"}}
    assert refused(tools=[{"type": "function", "function": wrong}]).startswith("tools[0]")
    odd = {"name": "f", "parameters": {"properties": {"a": {"not": {}}}}, "strict": True}
    assert refused(tools=[{"type": "function", "function": odd}], tool_choice="required") == "tools"


def test_a_model_that_may_call_makes_valid_calls_of_strict_tools(client):
    """A bias makes the random model begin a call where the mark is one token, and forms without one are not likely to be begun."""
    asked = {**ASK, "tools": [TOOLS[0]], "logit_bias": {str(token): 100 for token in client.marks}}
    words, calls, reason = joined(client.chat.completions.create(**asked, stream=True))
    answer = client.chat.completions.create(**asked).choices[0]
    assert (answer.message.content or "", answer.finish_reason) == (words, reason)
    assert [one.function.arguments for one in answer.message.tool_calls or ()] == [one["arguments"] for one in calls]
    for one in calls[:-1] if reason == "length" else calls:
        jsonschema.validate(json.loads(one["arguments"]), WEATHER)
    assert bool(calls) is bool(client.marks)


ONE = '{"city": "a}\\"b", "days": [1, {"x": 2}]}'
WRITTEN = {
    "hermes": f'Let me see.\n<tool_call>\n{{"name": "weather", "arguments": {ONE}}}\n</tool_call>\n<tool_call>\n'
    '{"name": "now", "arguments": {}}\n</tool_call>',
    "mistral": f'Let me see.[TOOL_CALLS] [{{"name": "weather", "arguments": {ONE}}}, {{"name": "now", "arguments": {{}}, "id": "a"}}]',
    "llama": f'<|python_tag|>{{"name": "weather", "parameters": {ONE}}}',
}


def parsed(form: str, folder: Path, text: str, cuts: list[int], most: int | None = None) -> tuple[str, list[list[str]]]:
    made = tool_format(tokenizer_of(folder, form))
    assert made is not None
    parser = ToolCallParser(made, {"weather", "now"}, most)
    words, calls = "", list[list[str]]()
    pieces = [text[start:end] for start, end in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    for more, found in [*(parser.add(piece) for piece in pieces), parser.finish()]:
        words += more
        for one in found:
            if one.name is not None:
                calls.append([one.name, ""])
            calls[one.number][1] += one.arguments
    return words, calls


@pytest.mark.parametrize("form", FORMS)
def test_calls_are_found_wherever_their_text_is_cut(form, tmp_path):
    draw, text = random.Random(1), WRITTEN[form]
    expected = [["weather", ONE], ["now", "{}"]][: 1 if form == "llama" else 2]
    words = "" if form == "llama" else "Let me see."
    for cuts in ([], list(range(1, len(text))), *(sorted(draw.sample(range(1, len(text)), 6)) for _ in range(5))):
        assert parsed(form, tmp_path, text, cuts) == (words, expected)
    assert parsed(form, tmp_path, text, [9], most=1) == (words, expected[:1])


@pytest.mark.parametrize(
    ("form", "text"),
    [
        ("hermes", "a <b> c  "),
        ("hermes", 'see <tool_call>\n{"name": "other", "arguments": {}}'),
        ("hermes", '<tool_call>\n{"names": "now"'),
        ("hermes", "half <tool_ca"),
        ("hermes", '<tool_call>\n{"name": "no'),
        ("mistral", '[TOOL_CALLS] {"name": "now", "arguments": {}}'),
        ("llama", '{"a": 1}'),
        ("llama", ' {"name": "now", "parameters": 3}'),
        ("llama", 'so: {"name": "now", "parameters": {}}'),
        ("llama", "  "),
    ],
)
def test_what_is_no_call_stays_text(form, text, tmp_path):
    for cuts in ([], list(range(1, len(text)))):
        assert parsed(form, tmp_path, text, cuts) == (text, [])


@pytest.mark.parametrize(
    ("form", "marks", "text"),
    [
        ("llama", ["<|python_tag|>"], '<|python_tag|>{"name": "weather", "parameters": {"city": "x"}}'),
        ("hermes", ["<tool_call>", "</tool_call>"], '<tool_call>\n{"name": "weather", "arguments": {"city":"x"}}\n</tool_call>'),
        ("mistral", [], '[TOOL_CALLS] [{"name": "weather", "arguments": {"city": "x", "days": 3}}]'),
    ],
)
def test_marks_that_are_special_tokens_are_in_the_grammar_and_in_the_text(form, marks, text, tmp_path):
    tokenizer = tokenizer_of(tmp_path, form, marks)
    made = tool_format(tokenizer)
    assert made is not None
    assert set(made.special.values()) == {*marks, *(["[TOOL_CALLS]"] if form == "mistral" else [])}
    compiler, ids = GrammarCompiler(tokenizer, (tokenizer.eos_id,), tokenizer.vocab_size), tokenizer.encode(text)
    tools = [CallableTool("weather", WEATHER, True)]
    for needs_call, several, answer in ((True, True, None), (False, True, None), (False, False, None), (False, True, json_rule({}))):
        grammar = calls_grammar(made, tools, needs_call=needs_call, several=several, answer=answer)
        assert compiler.compile(grammar).accepted(ids) == len(ids)
    decoder = MarkedText(StreamedText(tokenizer), made)
    assert decoder.add(*ids[:1]) + decoder.add(*ids[1:]) + decoder.finish() == text


def test_fields_that_a_schema_does_not_name_are_not_written_where_it_names_some():
    named, closed = {"type": "object", "properties": {"a": {}}}, {"additionalProperties": False}
    assert closed_schema(named) == named | closed
    for open_ in ({"type": "object"}, named | {"required": ["b"]}, named | {"additionalProperties": True}, named | {"anyOf": [{}]}):
        assert closed_schema(open_) == open_
    optional = {"anyOf": [{"$ref": "#/$defs/d"}, {"type": "null"}], "default": None}
    outer = {"properties": {"b": {"type": "array", "items": named}, "not": optional}, "$defs": {"d": named}}
    both = named | closed
    assert closed_schema(outer) == {"properties": {"b": {"type": "array", "items": both}, "not": optional}, "$defs": {"d": both}, **closed}
    for several in ({"allOf": [{"$ref": "#/$defs/d"}, outer]}, {"$ref": "#/$defs/d", "required": ["c"]}):
        assert closed_schema({"properties": {"a": several}, "$defs": {"d": named}}) == {
            "properties": {"a": several},
            "$defs": {"d": named},
            **closed,
        }


@pytest.mark.parametrize(
    "template", ["{{ messages }}", "{{ tools }}<tool_call><function=a>", "{{ tools }}[TOOL_CALLS]a[ARGS]", "<tool_call>", "{{ tools }}"]
)
def test_a_template_without_a_known_convention_offers_no_tools(template, tmp_path):
    assert tool_format(load_tokenizer(str(write_tokenizer(tmp_path, "qwen25", template=template)))) is None
