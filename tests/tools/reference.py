"""Reference pages from code: verbs of the command line, public names of the SDK, routes of the REST interface."""

from __future__ import annotations

import asyncio
import inspect
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click

import gpool
from gpool.cli.main import SECTIONS, cli
from gpool.core.errors import GpoolError
from gpool.server.app import make_app, open_server
from gpool.server.clock import SystemClock
from gpool.server.settings import Settings

METHODS = ("get", "post", "put", "patch", "delete")


def cli_page() -> str:
    """Every verb with its help text, by section of `gpool --help`."""
    context = click.Context(cli, info_name="gpool", terminal_width=90, max_content_width=90)
    lines = ["# Command line", "", "Generated from the commands. Exit codes and variables:"]
    lines += ["[command line and scripts](../guides/command-line.md).", ""]
    lines += ["```text", cli.get_help(context), "```"]
    for section, verbs in SECTIONS.items():
        lines += ["", f"## {section}"]
        for verb in verbs:
            command = cli.get_command(context, verb)
            assert command is not None
            for path, found, ctx in _tree(command, f"gpool {verb}", context):
                level = "###" if path.count(" ") == 1 else "####"
                lines += ["", f"{level} {path}", "", "```text", found.get_help(ctx), "```"]
    return "\n".join(lines) + "\n"


def _tree(
    command: click.Command, path: str, parent: click.Context
) -> Iterator[tuple[str, click.Command, click.Context]]:
    ctx = click.Context(
        command,
        parent=parent,
        info_name=path.rpartition(" ")[2],
        terminal_width=90,
        max_content_width=90,
    )
    yield path, command, ctx
    if isinstance(command, click.Group):
        for name in command.list_commands(ctx):
            found = command.get_command(ctx, name)
            assert found is not None
            yield from _tree(found, f"{path} {name}", ctx)


def sdk_page() -> str:
    """Public names of `gpool` with signatures and docstrings; errors as one table."""
    lines = ["# Python SDK", "", "Generated from the package. Options of a task:"]
    lines += ["[options](../options.md); results: [first task](../guides/first-task.md#results)."]
    errors = []
    for name in gpool.__all__:
        value = getattr(gpool, name)
        if isinstance(value, type) and issubclass(value, GpoolError):
            errors.append((name, value))
        elif name != "__version__":
            lines += ["", f"## gpool.{name}", "", *_described(name, value)]
    lines += ["", "## Errors", "", "| class | derived from | title |", "|---|---|---|"]
    for name, value in errors:
        title = getattr(value, "title", "")
        lines.append(f"| `gpool.{name}` | `{value.__bases__[0].__name__}` | {title} |")
    return "\n".join(lines) + "\n"


def _described(name: str, value: Any) -> list[str]:
    lines = [inspect.getdoc(value) or ""]
    if not isinstance(value, type):
        call = value if inspect.isroutine(value) else type(value).__call__
        return [*lines, "", "```text", f"gpool.{name}{inspect.signature(call)}", "```"]
    for member, found in inspect.getmembers(value):
        if member.startswith("_") or member in dir(BaseException):
            continue
        doc = (inspect.getdoc(found) or "").strip()
        if inspect.isroutine(found):
            lines += ["", f"### {name}.{member}", ""]
            lines += ["```text", f"{member}{inspect.signature(found)}", "```", "", doc]
        elif isinstance(found, property):
            lines += ["", f"### {name}.{member} (property)", "", doc]
    return lines


def rest_page() -> str:
    """Every route of the OpenAPI document, by path."""
    document = _openapi()
    lines = ["# REST interface", "", "Generated from the OpenAPI document, which a server has at"]
    lines += ["`/openapi.json`. Errors are problem documents (RFC 9457). Who may call a route:"]
    lines += ["[permissions](../permissions.md)."]
    for path, operations in sorted(document["paths"].items()):
        lines += ["", f"## {path}"]
        for method in METHODS:
            if (operation := operations.get(method)) is not None:
                lines += ["", f"### {method.upper()} {path}", "", *_operation(operation)]
    return "\n".join(lines) + "\n"


def _operation(operation: dict[str, Any]) -> list[str]:
    text = (operation.get("description") or operation.get("summary") or "").strip()
    lines = [text.replace("<", "&lt;")]
    if parameters := operation.get("parameters"):
        lines += ["", "| parameter | in | required |", "|---|---|---|"]
        for one in parameters:
            required = "yes" if one.get("required") else ""
            lines.append(f"| `{one['name']}` | {one['in']} | {required} |")
    if body := _schema(operation.get("requestBody")):
        lines += ["", f"Body: {body}"]
    answers = [
        f"{status} {_schema(reply)}".strip()
        for status, reply in sorted(operation["responses"].items())
        if status.startswith("2")
    ]
    refused = [status for status in sorted(operation["responses"]) if not status.startswith("2")]
    lines += ["", f"Answer: {', '.join(answers) or 'none'}"]
    return [*lines, *([f"; problems: {', '.join(refused)}"] if refused else [])]


def _schema(holder: dict[str, Any] | None) -> str:
    """Names of the schemas or media types of a body."""
    found = []
    for media, content in ((holder or {}).get("content") or {}).items():
        reference = (content.get("schema") or {}).get("$ref", "")
        found.append(f"`{reference.rpartition('/')[2] or media}`")
    return " or ".join(found)


def _openapi() -> dict[str, Any]:
    """The document of a server in this process, with an empty store."""

    async def read(folder: Path) -> dict[str, Any]:
        server = await open_server(Settings(data=folder), SystemClock())
        try:
            return make_app(server).openapi()
        finally:
            await server.store.close()

    with tempfile.TemporaryDirectory() as folder:
        return asyncio.run(read(Path(folder)))
