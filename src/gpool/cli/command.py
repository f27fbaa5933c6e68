"""Parts of the verbs: client of a command, shared options, names resolved to ids, targets of `gpool wait`."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

if TYPE_CHECKING:
    from gpool.client.client import Client
import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING
from urllib.parse import quote

from gpool.core.errors import Forbidden, GpoolError, Invalid, NotFound
from gpool.core.ids import ALPHABET, DIGITS, PREFIXES

if TYPE_CHECKING:
    from gpool.client.client import Client
    from gpool.client.values import Result


F = TypeVar("F", bound=Callable[..., Any])
MakeOption = Callable[..., Callable[[Any], Any]]
"""`click.option`, or one that an option section returned."""

as_json = click.option("--json", "as_json", is_flag=True, help="Print JSON instead of text.")


EXAMPLE_WIDTH = 74
"""Columns of a line of an example: a terminal of 80 less the indentation of help texts."""


def examples(*commands: str) -> str:
    lines = (line for command in commands for line in _folded(command))
    return "\n  ".join(("\b\nExamples:", *lines))


def _folded(command: str) -> list[str]:
    """Lines of a command that fit; a long one continues before an option, as a shell reads it."""
    lines = [""]
    for part in re.split(r" (?=-)", command):
        if lines[-1] and len(lines[-1]) + len(part) > EXAMPLE_WIDTH:
            lines[-1] += " \\"
            lines.append(f"    {part}")
        else:
            lines[-1] = f"{lines[-1]} {part}" if lines[-1] else part
    return lines


class SectionOption(click.Option):
    def __init__(self, *args: Any, section: str, **attrs: Any) -> None:
        super().__init__(*args, **attrs)
        self.section = section


def option_section(title: str) -> MakeOption:
    return partial(click.option, cls=SectionOption, section=title)


class SectionedCommand(click.Command):
    """`--help` groups options by section, in order of definition; others come last."""

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        sections: dict[str, list[tuple[str, str]]] = {}
        general: list[tuple[str, str]] = []
        for param in self.get_params(ctx):
            record = param.get_help_record(ctx) if isinstance(param, click.Option) else None
            if record is not None and isinstance(param, SectionOption):
                sections.setdefault(param.section, []).append(record)
            elif record is not None:
                general.append(record)
        for title, records in (*sections.items(), ("Options", general)):
            with formatter.section(title):
                formatter.write_dl(records)


class VerbGroup(click.Group):
    """`renamed`: old names and new ones. Old names work unlisted, with a note on standard error."""

    def __init__(self, *args: Any, renamed: Mapping[str, str] | None = None, **attrs: Any) -> None:
        super().__init__(*args, **attrs)
        self.renamed = dict(renamed or {})

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if (verb := self.renamed.get(args[0])) is not None:
            if not ctx.resilient_parsing:
                path = ctx.command_path
                note = f"gpool: `{path} {args[0]}` is deprecated; use `{path} {verb}`"
                click.echo(note, err=True)
            args = [verb, *args[1:]]
        return super().resolve_command(ctx, args)


def into_option(option: MakeOption = click.option) -> Callable[[F], F]:
    return option(
        "-o",
        "--into",
        type=click.Path(path_type=Path, file_okay=False),
        default=Path(),
        metavar="DIR",
        help="Directory to download outputs to (default: the current one).",
    )


def listing(function: F, option: MakeOption = click.option) -> F:
    function = option(
        "--limit",
        type=click.IntRange(min=1),
        default=50,
        show_default=True,
        metavar="N",
        help="Maximum number of rows.",
    )(function)
    function = option("--all", "everything", is_flag=True, help="List all rows.")(function)
    return as_json(function)


EXTRAS = {"server": ("fastapi", "uvicorn"), "agent": ("structlog", "websockets")}
"""Modules whose absence means that an extra of gpool is not installed."""


def require_extra(extra: str, verb: str) -> None:
    """`Invalid` if an extra that the verb needs is not installed."""
    from importlib.util import find_spec

    for module in EXTRAS[extra]:
        if find_spec(module) is None:
            raise needs_extra(extra, verb, module)


def needs_extra(extra: str, verb: str, module: str) -> Invalid:
    return Invalid(
        f"{verb} needs packages that are not installed here (no module {module!r}); "
        f"run: pip install 'gpool[{extra}]', or in a checkout of gpool: pip install '.[{extra}]'"
    )


def is_joined() -> bool:
    """Return whether this machine has joined a pool as a node."""
    from gpool.client.config import home

    return any((home() / "nodes").glob("*.json"))


def client_of(ctx: click.Context) -> Client:
    """A test passes its own client as the context's object."""
    from gpool.client.client import Client

    warn_on_stderr(ctx)
    if isinstance(ctx.obj, Client):
        return ctx.obj
    client = Client(ctx.obj["url"], ctx.obj["key"])
    ctx.call_on_close(client.close)
    return client


def complete_tasks(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[str]:  # noqa: ARG001 - click's signature
    return _completed(ctx, "tasks", "id", incomplete)


def complete_nodes(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[str]:  # noqa: ARG001 - click's signature
    return _completed(ctx, "nodes", "name", incomplete)


def _completed(ctx: click.Context, what: str, member: str, incomplete: str) -> list[str]:
    """Newest ids or names that begin so; none if the pool does not answer at once."""
    from gpool.client.client import Client

    root = ctx.find_root()
    options = root.params
    try:
        if isinstance(root.obj, Client):  # a test's own
            found = root.obj.listing(what, limit=100)
        else:
            with Client(options.get("url"), options.get("key"), patience_s=0.0) as client:
                found = client.listing(what, limit=100)
    except GpoolError:
        return []
    return [str(one[member]) for one in found if str(one[member]).startswith(incomplete)]


def listed(
    client: Client,
    what: str,
    *,
    everything: bool,
    limit: int,
    on_page: Callable[[dict[str, Any]], None] | None = None,
    **filters: str,
) -> list[dict[str, Any]]:
    """Print a note if rows were left out that the caller did not choose to leave out."""
    if everything:
        return client.listing(what, limit=None, on_page=on_page, **filters)
    found = client.listing(what, limit=limit + 1, on_page=on_page, **filters)
    source = click.get_current_context().get_parameter_source("limit")
    if len(found) > limit and source is not click.core.ParameterSource.COMMANDLINE:
        note = f"gpool: showing the first {limit}; --limit N shows more, --all shows all"
        click.get_current_context().call_on_close(lambda: click.echo(note, err=True))
    return found[:limit]


class _WarningPrinter(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        from gpool.core.terminal import plain

        click.echo(f"gpool: {plain(record.getMessage())}", err=True)


def warn_on_stderr(ctx: click.Context) -> None:
    if __name__ in ctx.meta:
        return
    ctx.meta[__name__] = handler = _WarningPrinter(logging.WARNING)
    logger = logging.getLogger("gpool.client")
    logger.addHandler(handler)
    ctx.find_root().call_on_close(lambda: logger.removeHandler(handler))


_ID = re.compile(rf"(?:{'|'.join(PREFIXES.values())})-[{ALPHABET}]{{{DIGITS}}}")


def quoted(text: str) -> str:
    return quote(text, safe="")


def own_team_id(client: Client, text: str) -> str:
    return quoted(client.team_id(text))


def team_id(client: Client, text: str) -> str:
    return _id(client, text, "tm-", "team", all="true")


def user_id(client: Client, text: str) -> str:
    return _id(client, text, "u-", "user")


def _id(client: Client, text: str, prefix: str, kind: str, **filters: str) -> str:
    if text.startswith(prefix):
        return quoted(text)
    for one in client.listing(f"{kind}s", limit=None, on_page=None, **filters):
        if one["name"] == text:
            return str(one["id"])
    raise NotFound(f"no {kind} {text!r}; `gpool admin {kind}s ls --all` lists them")


def principal_names(client: Client) -> dict[str, str]:
    """Operators only."""
    return names_of(client, "users") | names_of(client, "teams", all="true")


def node_id(client: Client, what: str | None, *, own: bool = False) -> str:
    """Id of a node by id or name; without either, of the only node. `own`: prefer the caller's nodes.

    `NotFound` or `Invalid` if a name fits none or several: names are unique per owner only.
    """
    if what is not None and what.startswith("n-"):
        return quoted(what)
    nodes = client.listing("nodes")
    matching = _called(nodes, what)
    if own and len(matching) != 1:
        mine = _own(client, nodes)
        matching = _called(mine, what) or matching
        nodes = mine or nodes
    if len(matching) == 1:
        return str(matching[0]["id"])
    if not matching:
        there = ", ".join(f"{one['id']} ({one['name']})" for one in nodes) or "none"
        raise NotFound(f"no node {what!r}; nodes: {there}" if what else "no nodes yet")
    if what is None:
        there = ", ".join(f"{one['id']} ({one['name']})" for one in matching)
        raise Invalid(f"several nodes; name one of: {there}")
    there = ", ".join(f"{one['id']} (of {one['owner']}, {one['status']})" for one in matching)
    raise Invalid(f"{len(matching)} nodes have the name {what!r}; use an id instead: {there}")


def _called(nodes: list[dict[str, Any]], what: str | None) -> list[dict[str, Any]]:
    return [one for one in nodes if what is None or one["name"] == what]


def _own(client: Client, nodes: list[dict[str, Any]]) -> list[dict[str, Any]]:
    try:
        me = client.api.get_json("/v1/me")["id"]
    except Forbidden:
        return []
    return [one for one in nodes if one["owner"] == me]


def shared_names(nodes: Iterable[tuple[str | None, str | None]]) -> frozenset[str]:
    ids: dict[str, set[str]] = {}
    for id_, name in nodes:
        if id_ and name:
            ids.setdefault(name, set()).add(id_)
    return frozenset(name for name, those in ids.items() if len(those) > 1)


def shown_as(id_: str | None, name: str | None, shared: frozenset[str] = frozenset()) -> str:
    """The id if the name is shared or looks like an id."""
    own_prefix = (id_ or "").partition("-")[0]
    is_like_an_id = bool(name and (name.startswith(f"{own_prefix}-") or _ID.fullmatch(name)))
    return (name if name and name not in shared and not is_like_an_id else id_) or "-"


def names_of(client: Client, what: str, **filters: str) -> dict[str, str]:
    """Empty if the caller may not read the listing."""
    try:
        found = client.listing(what, limit=None, on_page=None, **filters)
    except Forbidden:
        return {}
    shared = shared_names((one["id"], one["name"]) for one in found)
    return {one["id"]: shown_as(one["id"], one["name"], shared) for one in found}


MOST_REPORTED = 10
"""Failed tasks of a batch that are reported one by one; the total is reported for all."""


@dataclass(frozen=True, slots=True)
class WaitOutcome:
    code: int
    document: dict[str, Any] = field(default_factory=dict)


Report = Callable[["Result | str"], None]
Wait = Callable[[float | None, Report], WaitOutcome]
"""Wait at most so many seconds; `TimeoutError` if the target has not ended."""


def is_batch(id_: str) -> bool:
    return id_.startswith("b-")


def awaited(client: Client, id_: str, *, as_json: bool) -> Wait:
    """`NotFound` if the id is unknown."""
    return (_batch if is_batch(id_) else _task)(client, id_, as_json)


def _task(client: Client, id_: str, as_json: bool) -> Wait:
    from gpool.client.values import exit_code

    run = client.get(id_)

    def wait(within_s: float | None, report: Report) -> WaitOutcome:
        result = run.wait(within_s)
        report(result)
        return WaitOutcome(exit_code(result), run.document() if as_json else {})

    return wait


def _batch(client: Client, id_: str, as_json: bool) -> Wait:
    from gpool.client.values import exit_code

    client.batch(id_)

    def wait(within_s: float | None, report: Report) -> WaitOutcome:
        codes: dict[int, int] = {}  # by position, of those that did not succeed
        total = 0
        for result in client.ended(id_, within_s):
            total += 1
            if code := exit_code(result):
                codes[result.position] = code
                if len(codes) <= MOST_REPORTED:
                    report(result)
        if codes:
            report(f"gpool: {len(codes)} of the {total} tasks of {id_} did not succeed")
        code = codes[min(codes)] if codes else 0
        return WaitOutcome(code, client.batch(id_) if as_json else {})

    return wait
