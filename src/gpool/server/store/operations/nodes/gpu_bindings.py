"""Bindings of a GPU's hardware uuid to its owner and payout wallet. The first claim of a uuid holds.

A later claim by another owner flags the claimant's row only, and keeps that row from being scheduled until an operator
decides; the holder's rows stay usable, or any account could take a GPU out of the pool by naming its uuid.
"""

from __future__ import annotations

from collections.abc import Collection

from gpool.core.ids import GpuId, NodeId, UserId
from gpool.core.model import Instant
from gpool.server.store.identity_values import Binding, GpuRow
from gpool.server.store.operation import operation
from gpool.server.store.protocol import Operation, Row, Statement
from gpool.server.store.rows import of_ids, of_names

TAKEN = "this GPU's uuid is bound to another owner, who claimed it first; an operator can decide otherwise"
ANOTHERS = "an operator decided that this GPU is another owner's"

GPU = (
    "g.id, g.node_id, n.owner_id, g.uuid, g.position, g.available, g.gone, g.flagged, g.quarantined, "
    "g.unproven, g.measured"
)


@operation
def bind(
    node: NodeId, owner: UserId, wallet: str | None, uuids: Collection[str], at: Instant
) -> Operation[tuple[str, ...]]:
    """Bind unbound uuids to `owner`; flag this node's rows of the others' and return their uuids, sorted.

    Simulated GPUs must not be passed: their uuids identify no device. A row that is flagged already stays so.
    """
    if not uuids:
        return ()
    wanted = {"wanted": of_names(uuids)}
    yield Statement(
        "INSERT INTO gpu_bindings (uuid, owner_id, wallet, bound_at) "
        "SELECT w.name, CAST(:owner AS BIGINT), CAST(:wallet AS TEXT), CAST(:at AS BIGINT) "
        "FROM {wanted} AS w WHERE true ON CONFLICT (uuid) DO NOTHING",
        {"owner": owner, "wallet": wallet, "at": at},
        wanted,
    )
    # Locked, so that an operator who decides for this owner meanwhile is not overruled by the flag below.
    rows = yield Statement(
        "SELECT b.uuid, b.owner_id, b.settled_at FROM {wanted} AS w JOIN gpu_bindings b ON b.uuid = w.name "
        "/*postgresql ORDER BY b.uuid FOR UPDATE OF b*/",
        {},
        wanted,
    )
    mine = [uuid for uuid, bound_to, _ in rows if bound_to == owner]
    taken = [uuid for uuid, bound_to, settled in rows if bound_to != owner and not settled]
    settled = [uuid for uuid, bound_to, settled in rows if bound_to != owner and settled]
    if mine:
        yield Statement(
            "UPDATE gpu_bindings SET wallet = :wallet WHERE owner_id = :owner "
            "AND uuid IN (SELECT name FROM {mine} AS m)",
            {"wallet": wallet, "owner": owner},
            {"mine": of_names(mine)},
        )
    for why, claimed in ((TAKEN, taken), (ANOTHERS, settled)):
        if claimed:
            yield Statement(
                "UPDATE gpus SET flagged = :why WHERE node_id = :node AND uuid IN (SELECT name FROM {claimed} AS c)",
                {"why": why, "node": node},
                {"claimed": of_names(claimed)},
            )
    return tuple(sorted((*taken, *settled)))


@operation
def unflag(gpu: GpuId, at: Instant) -> Operation[GpuRow | None]:
    """Bind the uuid to the owner of this GPU's node, by an operator's decision; flag the uuid's rows of other owners."""
    found = yield from _gpus("g.id = :gpu", gpu=gpu)
    if not found:
        return None
    uuid, owner = found[0].uuid, found[0].owner
    yield Statement(
        "INSERT INTO gpu_bindings (uuid, owner_id, wallet, bound_at, settled_at) "
        "VALUES (:uuid, :owner, (SELECT address FROM wallets WHERE user_id = :owner AND payout = 1), :at, :at) "
        "ON CONFLICT (uuid) DO UPDATE SET settled_at = excluded.settled_at, owner_id = excluded.owner_id, "
        "wallet = CASE WHEN gpu_bindings.owner_id = excluded.owner_id THEN gpu_bindings.wallet ELSE excluded.wallet END, "
        "bound_at = CASE WHEN gpu_bindings.owner_id = excluded.owner_id "
        "THEN gpu_bindings.bound_at ELSE excluded.bound_at END",
        {"uuid": uuid, "owner": owner, "at": at},
    )
    yield Statement(
        "UPDATE gpus SET flagged = CASE WHEN node_id IN (SELECT id FROM nodes WHERE owner_id = :owner) "
        "THEN NULL ELSE CAST(:why AS TEXT) END WHERE uuid = :uuid",
        {"owner": owner, "why": ANOTHERS, "uuid": uuid},
    )
    yield Statement("UPDATE gpus SET unproven = NULL WHERE id = :gpu", {"gpu": gpu})
    found = yield from _gpus("g.id = :gpu", gpu=gpu)
    return found[0]


@operation
def quarantine(gpu: GpuId, why: str | None) -> Operation[GpuRow | None]:
    """Take a GPU out of the pool for its health, or (None) say that it is well; the law beside `core.health`."""
    yield Statement("UPDATE gpus SET quarantined = :why WHERE id = :gpu", {"why": why, "gpu": gpu})
    found = yield from _gpus("g.id = :gpu", gpu=gpu)
    return found[0] if found else None


@operation
def binding(uuid: str) -> Operation[Binding | None]:
    rows = yield Statement(
        "SELECT uuid, owner_id, wallet, bound_at, settled_at FROM gpu_bindings WHERE uuid = :uuid",
        {"uuid": uuid},
    )
    return Binding(*rows[0]) if rows else None


@operation
def rebind_wallet(owner: UserId, wallet: str | None) -> Operation[int]:
    """The owner's payout wallet changed: it holds for all their GPUs."""
    rows = yield Statement(
        "UPDATE gpu_bindings SET wallet = :wallet WHERE owner_id = :owner RETURNING uuid",
        {"wallet": wallet, "owner": owner},
    )
    return len(rows)


@operation
def nodes_with(uuids: Collection[str]) -> Operation[tuple[NodeId, ...]]:
    """Ids of the nodes that have such a GPU now, whoever owns them."""
    rows = yield Statement(
        "SELECT DISTINCT g.node_id FROM {wanted} AS w JOIN gpus g ON g.uuid = w.name "
        "WHERE g.gone = 0 ORDER BY g.node_id",
        {},
        {"wanted": of_names(uuids)},
    )
    return tuple(NodeId(row[0]) for row in rows)


def _gpus(where: str, **parameters: int) -> Operation[tuple[GpuRow, ...]]:
    rows = yield Statement(
        f"SELECT {GPU} FROM gpus g JOIN nodes n ON n.id = g.node_id WHERE {where} ORDER BY g.node_id, g.position",  # noqa: S608
        parameters,
    )
    return tuple(_gpu(row) for row in rows)


def _gpu(row: Row) -> GpuRow:
    return GpuRow(
        GpuId(row[0]),
        NodeId(row[1]),
        UserId(row[2]),
        row[3],
        row[4],
        bool(row[5]),
        bool(row[6]),
        row[7],
        row[8],
        row[9],
        row[10],
    )


@operation
def gpu(id: GpuId) -> Operation[GpuRow | None]:
    found = yield from _gpus("g.id = :gpu", gpu=id)
    return found[0] if found else None


@operation
def gpu_rows(owner: UserId | None = None) -> Operation[tuple[GpuRow, ...]]:
    """All GPUs that are there, or one owner's."""
    if owner is None:
        return (yield from _gpus("g.gone = 0"))
    return (yield from _gpus("g.gone = 0 AND n.owner_id = :owner", owner=owner))


@operation
def flagged() -> Operation[tuple[GpuRow, ...]]:
    """For operators, those that are gone too."""
    return (yield from _gpus("g.flagged IS NOT NULL"))


@operation
def gpus_of_nodes(nodes: Collection[NodeId]) -> Operation[tuple[GpuRow, ...]]:
    """GPUs that these nodes have now, by node and position."""
    if not nodes:
        return ()
    rows = yield Statement(
        f"SELECT {GPU} FROM {{wanted}} AS w JOIN gpus g ON g.node_id = w.id JOIN nodes n ON n.id = g.node_id "  # noqa: S608
        "WHERE g.gone = 0 ORDER BY g.node_id, g.position",
        {},
        {"wanted": of_ids(nodes)},
    )
    return tuple(_gpu(row) for row in rows)
