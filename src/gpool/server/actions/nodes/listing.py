"""Reading of nodes and resources: pages filtered by the store, or single objects."""

from __future__ import annotations

from dataclasses import dataclass
from operator import itemgetter

from gpool.core.errors import Invalid, NotFound
from gpool.core.ids import GpuId, NodeId, decode, encode
from gpool.server.actions.nodes.documents import (
    GpuRows,
    cpu_document,
    gpu_documents,
    node_document,
)
from gpool.server.server import Server
from gpool.server.store.identity_values import Caller, GpuRow
from gpool.server.store.operation import operation
from gpool.server.store.operations.nodes import gpu_bindings
from gpool.server.store.operations.nodes import nodes as operations
from gpool.server.store.operations.nodes.nodes import NodeFilter
from gpool.server.store.protocol import Operation
from gpool.server.store.values import NodeRow
from gpool.wire.documents import GpuDocument, GpuPage, NodeDocument, NodePage

CPU_INDEX = 1 << 30
"""Index of a node's CPUs in a cursor: behind every GPU."""


@dataclass(frozen=True, slots=True)
class ResourceCursor:
    """The last resource listed, as `n-….INDEX`; `n-…`: all of that node."""

    node: NodeId
    index: int = CPU_INDEX

    @classmethod
    def parse(cls, text: str) -> ResourceCursor:
        node, dot, index = text.partition(".")
        if dot and not (index.isascii() and index.isdigit() and len(index) < 5):
            raise Invalid(f"'cursor' is {text[:60]!r}; give the `next` of the page before")
        return cls(NodeId(decode("node", node)), int(index) if dot else CPU_INDEX)

    def __str__(self) -> str:
        node = encode("node", self.node)
        return node if self.index == CPU_INDEX else f"{node}.{self.index}"


async def nodes(
    server: Server, who: Caller, wanted: NodeFilter, after: NodeId | None, limit: int
) -> NodePage:
    rows, gpus = await server.store.read(_page(wanted, after, limit))
    return NodePage(
        items=[
            node_document(server, who, gpus, row) for row in rows if matches(row, wanted.search)
        ],
        next=encode("node", rows[-1].node.id) if len(rows) == limit else None,
    )


async def resources(
    server: Server, wanted: NodeFilter, kind: str | None, after: ResourceCursor | None, limit: int
) -> GpuPage:
    before = None
    if after is not None:  # a node with resources behind the cursor is read again
        before = after.node if after.index == CPU_INDEX else NodeId(after.node - 1)
    rows, gpus = await server.store.read(_page(wanted, before, limit))
    items: list[GpuDocument] = []
    last: ResourceCursor | None = None
    for row in rows:
        for index, document in _resources(server, gpus, row, kind, wanted.search):
            place = ResourceCursor(row.node.id, index)
            if after is not None and (place.node, place.index) <= (after.node, after.index):
                continue
            if len(items) == limit:
                return GpuPage(items=items, next=str(last))
            items.append(document)
            last = place
    more = str(ResourceCursor(rows[-1].node.id)) if len(rows) == limit else None
    return GpuPage(items=items, next=more)


def _resources(
    server: Server, gpus: GpuRows, row: NodeRow, kind: str | None, search: str
) -> list[tuple[int, GpuDocument]]:
    found = gpu_documents(server, gpus, row) if kind != "cpu" else []
    if kind != "gpu" and row.node.offer.cpu_milli:
        found.append((CPU_INDEX, cpu_document(server, row)))
    text = search.lower()
    if text and text not in row.node.name.lower():
        found = [(index, each) for index, each in found if text in each.model.lower()]
    return sorted(found, key=itemgetter(0))


def matches(row: NodeRow, search: str) -> bool:
    text, offer = search.lower(), row.node.offer
    return text in row.node.name.lower() or any(text in gpu.model.lower() for gpu in offer.gpus)


async def node(server: Server, who: Caller, id_: NodeId) -> NodeDocument:
    rows, gpus = await server.store.read(_page(NodeFilter(node=id_), None, 1))
    for row in rows:
        return node_document(server, who, gpus, row)
    raise no_node(id_)


async def gpu(server: Server, id_: GpuId) -> GpuDocument:
    row, stored = await server.store.read(_gpu(id_))
    if row is not None and stored is not None:
        for _, document in gpu_documents(server, {(stored.node, stored.position): stored}, row):
            return document
    raise no_gpu(id_)


async def processors(server: Server, id_: NodeId) -> GpuDocument:
    row = await server.store.read(operations.node(id_))
    if row is None:
        raise no_node(id_)
    return cpu_document(server, row)


def no_node(id_: NodeId) -> NotFound:
    return NotFound(f"no node {encode('node', id_)} of yours")


def no_gpu(id_: GpuId) -> NotFound:
    return NotFound(f"no GPU {encode('gpu', id_)}; `gpool gpus` lists them")


@operation
def _page(
    wanted: NodeFilter, after: NodeId | None, limit: int
) -> Operation[tuple[tuple[NodeRow, ...], GpuRows]]:
    rows = yield from operations.node_page(wanted, after, limit)
    gpus = yield from gpu_bindings.gpus_of_nodes([row.node.id for row in rows])
    return rows, {(row.node, row.position): row for row in gpus}


@operation
def _gpu(id_: GpuId) -> Operation[tuple[NodeRow | None, GpuRow | None]]:
    stored = yield from gpu_bindings.gpu(id_)
    if stored is None or stored.gone:
        return None, None
    return (yield from operations.node(stored.node)), stored
