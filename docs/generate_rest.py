"""Generate the reference of the REST API from openapi.yaml and from the package's exceptions."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml
from generate_settings import table

import sandbox_provisioner
from sandbox_provisioner.errors import SandboxError, subclasses

SPEC = Path(sandbox_provisioner.__file__).with_name("server") / "openapi.yaml"
CLIENT_ROOMS = ("sandbox_provisioner.client.", "sandbox_provisioner.cli.")
"""Packages whose exceptions a server never sends."""
METHODS = ("get", "post", "put", "patch", "delete")
Json = Mapping[str, Any]


def markdown() -> str:
    """Return the operations by tag, then the schemas, then the problems."""
    spec = yaml.safe_load(SPEC.read_text())
    lines = [spec["info"]["description"], ""]
    for parameter in spec["components"]["parameters"].values():
        lines += [f"- Path parameter `{{{parameter['name']}}}`: {parameter['description']}"]
    lines += [""]
    for tag in spec["tags"]:
        lines += [f"## {tag['name'].capitalize()}", "", tag["description"], ""]
        for path, method, operation in _operations(spec):
            if tag["name"] in operation["tags"]:
                lines += _operation(spec, path, method, operation)
    lines += ["## Schemas", ""]
    for name, schema in spec["components"]["schemas"].items():
        lines += _schema(name, schema)
    return "\n".join([*lines, "## Problems", "", *_problems(spec)])


def _operations(spec: Json) -> Iterator[tuple[str, str, Json]]:
    for path, item in spec["paths"].items():
        for method in METHODS:
            if method in item:
                parameters = [*item.get("parameters", []), *item[method].get("parameters", [])]
                yield path, method, {**item[method], "parameters": parameters}


def _operation(spec: Json, path: str, method: str, operation: Json) -> list[str]:
    lines = [f"### {method.upper()} {path}", "", operation["summary"], ""]
    if "description" in operation:
        lines += [operation["description"], ""]
    parameters = [_resolve(spec, parameter) for parameter in operation["parameters"]]
    rows = [
        (f"`{found['name']}`", _kind(found["schema"]), found.get("description", ""))
        for found in parameters
        if found["in"] == "query"
    ]
    if rows:
        lines += [*table(("query parameter", "", ""), rows), ""]
    if "requestBody" in operation:
        lines += [f"Body: {_content(operation['requestBody'])}.", ""]
    for status, answer in operation["responses"].items():
        if status < "400":
            body = _content(answer)
            lines += [f"Response {status}{f', {body}' if body else ''}: {answer['description']}", ""]
    refused = ", ".join(status for status in operation["responses"] if status >= "400")
    return [*lines, f"Errors: {refused}; see [problems](#problems).", ""]


def _schema(name: str, schema: Json) -> list[str]:
    lines = [f"(schema-{name.lower()})=", f"### {name}", ""]
    if "description" in schema:
        lines += [schema["description"], ""]
    if "properties" not in schema:
        return [*lines, f"{_kind(schema)[:1].upper()}{_kind(schema)[1:]}.", ""]
    rows = []
    for field, value in schema["properties"].items():
        must = "" if field in schema.get("required", ()) else "optional"
        rows.append((f"`{field}`", _kind(value), must, value.get("description", "")))
    return [*lines, *table(("field", "", "", ""), rows), ""]


def _kind(schema: Json) -> str:
    """Return the type of a value, in words."""
    if "$ref" in schema:
        return _link(schema["$ref"])
    if "oneOf" in schema:
        return " or ".join(_kind(option) for option in schema["oneOf"])
    if "enum" in schema:
        return "one of " + ", ".join(f"`{value}`" for value in schema["enum"])
    kinds = schema["type"] if isinstance(schema["type"], list) else [schema["type"]]
    words = " or ".join(schema.get("format", kind) if kind == "string" else kind for kind in kinds)
    if "items" in schema:
        words += f" of {_kind(schema['items'])}"
    return ", ".join([words, *_bounds(schema)])


def _bounds(schema: Json) -> Iterator[str]:
    texts = {
        "pattern": "matches `{}`",
        "contentEncoding": "encoded as `{}`",
        "minimum": "at least `{}`",
        "maximum": "at most `{}`",
        "minLength": "at least {} characters",
        "maxLength": "at most {} characters",
        "minItems": "at least {} items",
        "maxItems": "at most {} items",
        "default": "default `{}`",
    }
    for name, text in texts.items():
        if name in schema:
            yield text.format(f"{schema[name]:g}" if isinstance(schema[name], float) else schema[name])


def _content(holder: Json) -> str:
    """Return the media type and schema of a body; empty without one."""
    kinds = holder.get("content", {})
    return ", ".join(
        f"{_kind(body['schema'])} as JSON" if media == "application/json" else f"`{media}`"
        for media, body in kinds.items()
    )


def _link(reference: str) -> str:
    name = reference.rpartition("/")[2]
    return f"[{name}](#schema-{name.lower()})"


def _resolve(spec: Json, value: Json) -> Json:
    if "$ref" not in value:
        return value
    found: Any = spec
    for part in value["$ref"].removeprefix("#/").split("/"):
        found = found[part]
    return {**_resolve(spec, found), **{key: other for key, other in value.items() if key != "$ref"}}


def _problems(spec: Json) -> Iterable[str]:
    """Return a table of HTTP statuses, and one of exceptions with their problem types and exit statuses."""
    answers = {
        status: _resolve(spec, answer)["description"]
        for _, _, operation in _operations(spec)
        for status, answer in operation["responses"].items()
        if status >= "400"
    }
    sent = [error for error in subclasses() if not f"{error.__module__}.".startswith(CLIENT_ROOMS)]
    rows = [
        (
            f"{error.kind.status.value}",
            f"`{error.kind}`",
            f"{error.kind.exit_status}",
            f"`{error.__name__}`",
            about(error),
        )
        for error in sorted(sent, key=lambda error: (error.kind.status, error.kind, error.__name__))
    ]
    return [
        *table(("status", ""), sorted(answers.items())),
        "",
        *table(("status", "type ends in", "exit status of the command", "name in the log", ""), rows),
        "",
    ]


def about(error: type[SandboxError]) -> str:
    """Return the first line of an exception's docstring, up to a semicolon."""
    if error is SandboxError:
        return "Any other error"
    return (error.__doc__ or "").strip().partition("\n")[0].partition(";")[0].rstrip(".").replace("``", "`")
