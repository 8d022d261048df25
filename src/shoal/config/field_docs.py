"""Descriptions of settings: the docstrings under the schema's fields, read from the source."""

from __future__ import annotations

import ast
import inspect
import textwrap

from shoal.config.fields import Section


def field_docs(section: type[Section]) -> dict[str, str]:
    """The docstring under each field of a section, by name."""
    docs: dict[str, str] = {}
    for base in reversed(section.__mro__[:-2]):
        body = ast.parse(textwrap.dedent(inspect.getsource(base))).body[0]
        assert isinstance(body, ast.ClassDef)
        for statement, following in zip(body.body, body.body[1:], strict=False):
            if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name) and isinstance(following, ast.Expr):
                docs[statement.target.id] = " ".join(str(ast.literal_eval(following.value)).split())
    return docs
