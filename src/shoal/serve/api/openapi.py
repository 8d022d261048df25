"""The description of the API at /openapi.json: the schema that FastAPI generates, and additions that it cannot derive."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic import BaseModel

from shoal.serve.api.responses import ErrorResponse

_REF = "#/components/schemas/{model}"
_ERRORS = {
    400: "The request cannot be answered; `param` names the field.",
    404: "No such model.",
    413: "The body is too large.",
    415: "The body is not JSON.",
    429: "Too many requests wait.",
    503: "The answer could not be finished.",
    504: "The answer took too long.",
}


def generated_responses(whole: type[BaseModel], chunk: type[BaseModel]) -> dict[int | str, dict[str, Any]]:
    """The responses of a route that generates text, for FastAPI's `responses`."""
    stream = {"text/event-stream": {"schema": {"$ref": _REF.format(model=chunk.__name__)}}}
    found: dict[int | str, dict[str, Any]] = {
        200: {"model": whole, "content": stream, "description": "The answer; with `stream`, chunks of it as server-sent events."}
    }
    return found | error_responses(*_ERRORS)


def error_responses(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """The errors that a route may answer with, for FastAPI's `responses`."""
    return {status: {"model": ErrorResponse, "description": _ERRORS[status]} for status in statuses}


def describe(app: FastAPI, *chunks: type[BaseModel]) -> dict[str, Any]:
    """The OpenAPI document. `chunks`: models that occur only in streams."""
    found = get_openapi(title=app.title, version=app.version, description=app.description, routes=app.routes)
    schemas: dict[str, Any] = found["components"]["schemas"]
    for chunk in chunks:
        schema = chunk.model_json_schema(ref_template=_REF)
        schemas |= schema.pop("$defs", {}) | {chunk.__name__: schema}
    for methods in found["paths"].values():
        for operation in methods.values():
            operation["responses"].pop("422", None)  # a body that is refused is answered with 400, in OpenAI's form
            if "security" in operation:
                refusal = {"application/json": {"schema": {"$ref": _REF.format(model=ErrorResponse.__name__)}}}
                operation["responses"]["401"] = {"description": "The key is missing or wrong.", "content": refusal}
    for name in ("HTTPValidationError", "ValidationError"):
        schemas.pop(name, None)
    return found
