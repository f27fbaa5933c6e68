"""The pool page: every GPU as a bar, grouped by machine; the visitor's queue; totals. Live by one stream."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlencode

from starlette.requests import Request
from starlette.responses import Response

from gpool.core.ids import NodeId, UserId, decode, encode
from gpool.core.model import SECOND, Permission
from gpool.core.permissions import POOL, Action
from gpool.server.actions import listing
from gpool.server.actions.audit import note_read
from gpool.server.actions.tasks import explain
from gpool.server.api.callers import server_of
from gpool.server.server import Server
from gpool.server.store.identity_values import Caller
from gpool.server.store.operations import nodes as node_operations
from gpool.server.store.operations.identity import users
from gpool.server.store.operations.node_pages import NodeFilter
from gpool.server.web.live import Fragment, Fragments, Render, live_answer, since_of, views_of
from gpool.server.web.parts import part
from gpool.server.web.rendering import environment, page
from gpool.server.web.routing import PageRouter
from gpool.server.web.visitors import visitor
from gpool.wire.documents import instant_to_datetime
from gpool.wire.nodes import GpuDocument, NodeDocument

routes = PageRouter("pages")

MOST_NODES = 1000
MOST_GPUS = 240
"""GPUs on one page; the filter finds the others."""
MOST_WAITING = 8
HOUR = 3600 * SECOND


@dataclass(frozen=True, slots=True)
class PoolFilter:
    search: str = ""
    state: str = ""
    tier: str = ""
    everybody: bool = False  # the queue of all users, for operators

    @classmethod
    def of(cls, request: Request) -> PoolFilter:
        query = request.query_params
        states, tiers = ("free", "busy", "offline", "own"), ("container", "vm")
        state, tier = query.get("state", ""), query.get("tier", "")
        return cls(
            query.get("q", "").strip()[:100],
            state if state in states else "",
            tier if tier in tiers else "",
            query.get("all") == "1",
        )

    @property
    def query(self) -> str:
        kept = {"q": self.search, "state": self.state, "tier": self.tier}
        return urlencode(kept | ({"all": "1"} if self.everybody else {}))

    @property
    def action(self) -> Action:
        return Action.TASKS_LIST_ALL if self.everybody else Action.GPUS_LIST

    def takes(self, gpu: GpuDocument) -> bool:
        if self.tier and self.tier not in gpu.tiers:
            return False
        if self.state == "busy":
            return gpu.status in ("busy", "shared")
        return self.state in ("", "own", gpu.status)


@dataclass(frozen=True, slots=True)
class _Viewing:
    """Who looks, as far as it changes the rows: operators, owners of machines, and everybody else alike."""

    who: Caller
    kind: str


@routes.page("/", Action.GPUS_LIST, Action.TASKS_LIST_ALL)
async def show_pool(request: Request) -> Response:
    """Show the pool."""
    wanted = PoolFilter.of(request)
    who = await visitor(request, wanted.action)
    views = views_of(request)
    pool, queue = [await views.fresh(*each) for each in await _sources(request, who, wanted)]
    return page(
        request,
        "pool.html",
        pool=pool.fragments,
        queue=queue.fragments["queue"].html,
        wanted=wanted,
        since=views.version,
    )


@routes.live("/live/pool", Action.GPUS_LIST, Action.TASKS_LIST_ALL)
async def stream_pool(request: Request) -> Response:
    """Stream changes of the pool page."""
    wanted = PoolFilter.of(request)
    who = await visitor(request, wanted.action)
    sources = await _sources(request, who, wanted)
    return await live_answer(request, sources, since_of(request))


async def _sources(
    request: Request, who: Caller, wanted: PoolFilter
) -> list[tuple[Hashable, Render]]:
    server = server_of(request)
    if wanted.everybody:  # the view is shared, its reading is not
        await note_read(server, who, Action.TASKS_LIST_ALL, POOL, "")
    viewing = await _viewing(server, who)
    return [
        (("pool", wanted, viewing.kind), _pool(server, viewing, wanted)),
        (
            ("queue", who.user.id, who.scopes, who.key_team, wanted.everybody),
            _queue(server, who, wanted.everybody),
        ),
    ]


async def _viewing(server: Server, who: Caller) -> _Viewing:
    if Permission.OPERATOR in who.user.permissions:
        return _Viewing(who, f"operator {who.user.id}")
    owned = await server.store.read(node_operations.nodes(who.user.id))
    return _Viewing(who, str(who.user.id) if owned else "")


def _parts() -> Any:
    """Macros of the page's fragments."""
    return environment().get_template("pool_parts.html").module


def _pool(server: Server, viewing: _Viewing, wanted: PoolFilter) -> Render:
    async def render() -> Fragments:
        who = viewing.who
        owner = who.user.id if wanted.state == "own" else None
        found = await listing.nodes(
            server, who, NodeFilter(owner=owner, search=wanted.search), None, MOST_NODES
        )
        names = await _owner_names(server, who, found.items)
        return _pool_fragments(server, found.items, wanted, names)

    return render


async def _owner_names(server: Server, who: Caller, nodes: list[NodeDocument]) -> dict[str, str]:
    """Names of owners as the visitor may know them: their own, and all for operators."""
    own = encode("user", who.user.id)
    if Permission.OPERATOR not in who.user.permissions:
        return {own: "you"}
    ids = sorted({UserId(decode("user", node.owner)) for node in nodes})
    names = await server.store.read(users.names_of(ids))
    return {encode("user", id_): name for id_, name in names.items()}


def _pool_fragments(
    server: Server, nodes: list[NodeDocument], wanted: PoolFilter, names: dict[str, str]
) -> Fragments:
    parts, now = _parts(), instant_to_datetime(server.now)
    everything = [gpu for node in nodes for gpu in node.gpus]
    rows, left_out, sections = 0, 0, []
    fragments: dict[str, Fragment] = {}
    for node in sorted(nodes, key=lambda node: (node.status != "online", node.name, node.id)):
        gpus = [gpu for gpu in node.gpus if wanted.takes(gpu)]
        if not gpus and (wanted.state or wanted.tier or node.gpus):
            continue
        if rows + len(gpus) > MOST_GPUS:
            left_out += len(gpus)
            continue
        rows += len(gpus)
        entry = server.picture.state.nodes.get(NodeId(decode("node", node.id)))
        hours = entry.node.merit.mtbf / HOUR if entry is not None and entry.node else None
        owner = names.get(node.owner, node.owner)
        head = f"h-{node.id}"
        lines = {gpu.id: parts.gpu_row(gpu) for gpu in gpus}
        fragments[head] = Fragment(parts.node_head(head, node, owner, hours, now))
        fragments |= {id_: Fragment(line) for id_, line in lines.items()}
        sections.append(parts.node_section(node, fragments[head].html, list(lines.values())))
    whole = parts.gpu_list(sections, left_out, wanted)
    return {
        "facts": Fragment(parts.facts(_totals(server, everything, nodes))),
        "list": Fragment(whole, " ".join((str(left_out), *fragments))),
        **fragments,
    }


@dataclass(frozen=True, slots=True)
class PoolTotals:
    gpus: int
    busy: int
    free: int
    offline: int
    nodes: int
    waiting: int
    watts: float
    utilisation: float | None
    cheapest: int | None


def _totals(server: Server, gpus: list[GpuDocument], nodes: list[NodeDocument]) -> PoolTotals:
    readings = [gpu.reading for gpu in gpus if gpu.reading is not None]
    used = [each.utilisation_percent for each in readings if each.utilisation_percent is not None]
    usable = [gpu.price_microcredits for gpu in gpus if gpu.status in ("free", "shared", "busy")]
    return PoolTotals(
        gpus=len(gpus),
        busy=sum(gpu.status in ("busy", "shared") for gpu in gpus),
        free=sum(gpu.status == "free" for gpu in gpus),
        offline=sum(gpu.status == "offline" for gpu in gpus),
        nodes=sum(node.status == "online" for node in nodes),
        waiting=server.picture.waiting,
        watts=sum(each.power_watts or 0 for each in readings),
        utilisation=sum(used) / len(used) if used else None,
        cheapest=min(usable) if usable else None,
    )


def _queue(server: Server, who: Caller, everybody: bool) -> Render:
    async def render() -> Fragments:
        query = explain.QueueQuery(everybody=everybody, limit=MOST_WAITING)
        found = await part(explain.queue_page(server, who, query))
        now = instant_to_datetime(server.now)
        is_operator = Permission.OPERATOR in who.user.permissions
        shown = _parts().queue(found.value, found.missing, everybody, is_operator, now)
        return {"queue": Fragment(shown)}

    return render
