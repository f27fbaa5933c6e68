"""Names resolved to ids, and the text shown for an id. An ambiguous name is an error."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from gpool.core.errors import Forbidden, Invalid, NotFound
from gpool.core.ids import ALPHABET, DIGITS, PREFIXES

if TYPE_CHECKING:
    from gpool.client.client import Client


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
    for one in client.listing(f"{kind}s", limit=None, **filters):
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
        found = client.listing(what, limit=None, **filters)
    except Forbidden:
        return {}
    shared = shared_names((one["id"], one["name"]) for one in found)
    return {one["id"]: shown_as(one["id"], one["name"], shared) for one in found}
