"""Validate requests against openapi.yaml, so that the API and its description cannot differ."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import yaml
from jsonschema import Draft202012Validator, ValidationError
from jsonschema.validators import extend

from .._text import refuse_constant
from ..errors import BadRequestError

SPEC = Path(__file__).with_name("openapi.yaml")

MAX_BODY = 64 << 10
"""Maximum bytes of a request's body."""

IGNORED_PARAMETERS = ("token", "no_track_activity", "_xsrf")
"""Query parameters of Jupyter Server itself. JupyterLab also adds one whose name is the current time."""

NUMBER = re.compile(r"-?(0|[1-9][0-9]{0,30})(\.[0-9]{1,30})?([eE][+-]?[0-9]{1,3})?")
INTEGER = re.compile(r"-?(0|[1-9][0-9]{0,30})")


@cache
def spec() -> dict[str, Any]:
    """Return the parsed openapi.yaml."""
    document: dict[str, Any] = yaml.safe_load(SPEC.read_text())
    return document


def check(schema: Mapping[str, Any], value: Any, what: str) -> None:
    """Raise BadRequestError if ``value`` does not match a schema of openapi.yaml; ``what`` names it in the message."""
    validator = _Validator({**schema, "components": spec()["components"]})
    for error in validator.iter_errors(value):
        where = ".".join(map(str, error.absolute_path))
        name = f"{what}, at {where}," if where else what
        description = error.schema.get("description", "") if isinstance(error.schema, Mapping) else ""
        remedy = " ".join(str(description).split())
        raise BadRequestError(f"{name} is invalid: {error.message[:300]}.", remedy, where or what)


def check_path(path: str, values: Mapping[str, str]) -> None:
    """Raise BadRequestError if a variable part of the URL with template ``path`` is invalid."""
    for parameter in _parameters(spec()["paths"][path]):
        if parameter["in"] == "path":
            check(parameter["schema"], values[parameter["name"]], parameter["name"])


def read_query(path: str, method: str, arguments: Mapping[str, Sequence[str]]) -> dict[str, Any]:
    """Return the query parameters, converted to their types, with defaults. Raises BadRequestError."""
    parameters = _parameters(spec()["paths"][path][method])
    known = {parameter["name"]: parameter["schema"] for parameter in parameters}
    found = {name: schema["default"] for name, schema in known.items() if "default" in schema}
    for name, values in arguments.items():
        if name in IGNORED_PARAMETERS or name.isdecimal():
            continue
        if name not in known:
            remedy = f"Known parameters: {', '.join(known) or 'none'}."
            raise BadRequestError(f"Unknown parameter {name!r:.100}.", remedy, name[:100])
        if len(values) != 1:
            raise BadRequestError(f"The parameter {name} is given {len(values)} times.", "Give it once.", name)
        found[name] = _typed(known[name], values[0])
        check(known[name], found[name], name)
    for parameter in parameters:
        if parameter.get("required") and parameter["name"] not in found:
            raise BadRequestError("A query parameter is missing.", f"Add {parameter['name']}.", parameter["name"])
    return found


def read_body(path: str, method: str, body: bytes) -> dict[str, Any]:
    """Return a request's body. Raises BadRequestError if it is too long, not JSON, or does not match openapi.yaml."""
    if len(body) > MAX_BODY:
        raise BadRequestError(f"The body of the request has {len(body)} bytes.", f"The maximum is {MAX_BODY}.")
    try:
        value = json.loads(body.decode(), parse_constant=refuse_constant)
        json.dumps(value, ensure_ascii=False).encode()
    except (ValueError, RecursionError) as error:
        raise BadRequestError("The body of the request is not valid JSON.", "Send one object, as UTF-8.") from error
    schema = spec()["paths"][path][method]["requestBody"]["content"]["application/json"]["schema"]
    try:
        check(schema, value, "The body")
    except RecursionError as error:
        raise BadRequestError("The body of the request is nested too deeply.", "Send one plain object.") from error
    return dict(value)


def _pattern(validator: Any, pattern: str, instance: Any, schema: Any) -> Iterator[ValidationError]:
    """Check ``pattern`` as JSON Schema does: unlike in Python, ``$`` does not match before a final newline."""
    if isinstance(instance, str) and not re.search(pattern.replace("$", r"\Z"), instance):
        yield ValidationError(f"{instance[:100]!r} does not match {pattern}")


_Validator: Any = extend(Draft202012Validator, {"pattern": _pattern})  # type: ignore[no-untyped-call]


def _parameters(of: Mapping[str, Any]) -> list[dict[str, Any]]:
    return [_resolved(parameter) for parameter in of.get("parameters", [])]


def _resolved(node: dict[str, Any]) -> dict[str, Any]:
    found: Any = node
    while "$ref" in found:
        names = found["$ref"].removeprefix("#/").split("/")
        found = spec()
        for name in names:
            found = found[name]
    return dict(found)


def _typed(schema: dict[str, Any], text: str) -> Any:
    """Return ``text`` converted to the type of ``schema``; unchanged if that is impossible."""
    kind = _resolved(schema).get("type")
    if kind == "boolean" and text in ("true", "false"):
        return text == "true"
    if kind == "integer" and INTEGER.fullmatch(text):
        return int(text)
    return float(text) if kind == "number" and NUMBER.fullmatch(text) else text
