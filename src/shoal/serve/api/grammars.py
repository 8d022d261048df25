"""The grammar that the answer to a request must follow: from its response format, its tools, or one that it has itself."""

from __future__ import annotations

from typing import NamedTuple

from shoal.data.packages import import_optional
from shoal.errors import ShoalError
from shoal.serve.api.requests import (
    ChatRequest,
    GenerationRequest,
    JsonSchemaFormat,
    NamedToolChoice,
    SomeToolsChoice,
    TextFormat,
    ToolDefinition,
    chosen_tools,
)
from shoal.serve.constraints import GrammarCompiler, TokenConstraint, check_size
from shoal.serve.tool_formats import CallableTool, ToolFormat, arguments_schema, calls_grammar, choice_rule, closed_schema, json_rule
from shoal.serve.tool_parser import ToolCallParser
from shoal.web.auth import RefusedError

_GUIDES = ("guided_regex", "guided_choice", "grammar")
_NO_CONVENTION = (
    "this model's chat template has no convention for tools that this server reads (Llama 3, Qwen, Hermes or Mistral): "
    "serve another model, or describe the answer with response_format"
)


class ToolUse(NamedTuple):
    """How an answer may call tools."""

    form: ToolFormat
    tools: list[ToolDefinition]
    needs_call: bool
    several: bool

    def parser(self) -> ToolCallParser:
        """Finds the calls in one answer."""
        several = self.several and self.form.takes_several
        return ToolCallParser(self.form, {one.function.name for one in self.tools}, None if several else 1)


def tool_use(request: GenerationRequest, form: ToolFormat | None) -> ToolUse | None:
    """None: the answer calls no tools. Raises RefusedError where the model has no convention for them."""
    if not isinstance(request, ChatRequest) or not request.tools or request.tool_choice == "none":
        return None
    if form is None:
        raise RefusedError(400, _NO_CONVENTION, param="tools", code="unsupported_parameter")
    choice, names = request.tool_choice, chosen_tools(request.tool_choice)
    tools = [one for one in request.tools if names is None or one.function.name in names]
    if isinstance(choice, NamedToolChoice):
        return ToolUse(form, tools, True, False)
    mode = choice.allowed_tools.mode if isinstance(choice, SomeToolsChoice) else choice
    return ToolUse(form, tools, mode == "required", request.parallel_tool_calls)


async def constraint_for(request: GenerationRequest, use: ToolUse | None, compiler: GrammarCompiler) -> TokenConstraint | None:
    """The grammar of the answer, compiled; None: it is free. Raises RefusedError."""
    param = _param(request, use)
    if param is None:
        return None
    try:
        return await compiler.compiled(lambda: _grammar_of(request, use))
    except ShoalError as error:
        raise RefusedError(400, f"{param}: {error}", param=param, code="invalid_grammar") from None


def _param(request: GenerationRequest, use: ToolUse | None) -> str | None:
    """The field of the request that asks for a grammar; None: none does. Raises RefusedError where several do."""
    guides = [name for name in _GUIDES if getattr(request, name) is not None]
    has_format = isinstance(request, ChatRequest) and not isinstance(request.response_format, TextFormat | None)
    others = [*guides, *(["response_format"] if has_format else []), *(["tools"] if use is not None else [])]
    if guides and len(others) > 1:
        raise RefusedError(400, f"{guides[0]} cannot be combined with {others[1]}: leave one of them out", param=guides[0])
    if use is not None and (use.needs_call or any(one.function.strict for one in use.tools)):
        return "tools"
    return next((one for one in others if one != "tools"), None)


def _grammar_of(request: GenerationRequest, use: ToolUse | None) -> str:
    """Raises GrammarError for one that is too large."""
    for name in _GUIDES:
        check_size(getattr(request, name))
    if request.grammar is not None:
        return request.grammar
    if request.guided_regex is not None:
        return str(import_optional("llguidance").LLMatcher.grammar_from_regex(request.guided_regex))
    if request.guided_choice is not None:
        return f"start: {choice_rule(request.guided_choice)}\n"
    answer = _answer_of(request)
    if use is None:
        return f"start: {answer}\n"
    functions = [tool.function for tool in use.tools]
    check_size([one.parameters for one in functions])
    tools = [CallableTool(one.name, closed_schema(arguments_schema(one.parameters)), bool(one.strict)) for one in functions]
    return calls_grammar(use.form, tools, needs_call=use.needs_call, several=use.several, answer=answer)


def _answer_of(request: GenerationRequest) -> str | None:
    """The rule of an answer in the request's format; None: any text."""
    chosen = request.response_format if isinstance(request, ChatRequest) else None
    if chosen is None or isinstance(chosen, TextFormat):
        return None
    schema = (chosen.json_schema.content or {}) if isinstance(chosen, JsonSchemaFormat) else {"type": "object"}
    check_size(schema)
    return json_rule(closed_schema(schema))
