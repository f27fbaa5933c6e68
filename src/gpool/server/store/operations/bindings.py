"""Which GPU (by its hardware uuid) is whose, and which wallet is paid for it. One seen under two owners is flagged.

A flag stands on the GPU's row of every node that ever named it, and keeps all of them from being scheduled, until an
operator settles whose it is. Once settled, a claim by somebody else flags only the claimant's.
"""

from __future__ import annotations

from collections.abc import Collection

from gpool.core.ids import GpuId, NodeId, UserId
from gpool.core.model import Instant
from gpool.server.store.identity_values import Binding, GpuRow
from gpool.server.store.operation import operation
from gpool.server.store.protocol import Operation, Row, Statement
from gpool.server.store.rows import of_names

TWO_OWNERS = "this GPU's uuid was seen under two owners; an operator decides whose it is"
ANOTHERS = "an operator decided that this GPU is another owner's"

GPU = (
    "g.id, g.node_id, n.owner_id, g.uuid, g.position, g.available, g.gone, g.flagged, g.quarantined"
)


@operation
def bind(
    node: NodeId, owner: UserId, wallet: str | None, uuids: Collection[str], at: Instant
) -> Operation[tuple[str, ...]]:
    """Binds what is nobody's yet, and gives those of `uuids` that are flagged on this node now.

    Only real GPUs have uuids that mean anything: simulated ones are not to be bound. `nodes_with` tells whom else a
    new flag concerns.
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
    rows = yield Statement(
        "SELECT b.uuid, b.owner_id, b.settled_at FROM {wanted} AS w JOIN gpu_bindings b ON b.uuid = w.name "
        "/*postgresql ORDER BY b.uuid FOR UPDATE OF b*/",
        {},
        wanted,
    )
    earlier = yield Statement(
        "SELECT g.uuid FROM {wanted} AS w JOIN gpus g ON g.uuid = w.name WHERE g.flagged IS NOT NULL",
        {},
        wanted,
    )
    disputed = {row[0] for row in earlier}
    mine = [uuid for uuid, bound_to, _ in rows if bound_to == owner]
    flag_all = [
        uuid
        for uuid, bound_to, settled in rows
        if settled is None and (bound_to != owner or uuid in disputed)
    ]
    flag_here = [uuid for uuid, bound_to, settled in rows if settled and bound_to != owner]
    if mine:
        yield Statement(
            "UPDATE gpu_bindings SET wallet = :wallet WHERE owner_id = :owner "
            "AND uuid IN (SELECT name FROM {mine} AS m)",
            {"wallet": wallet, "owner": owner},
            {"mine": of_names(mine)},
        )
    if flag_all:
        yield Statement(
            "UPDATE gpus SET flagged = :why WHERE flagged IS NULL AND uuid IN (SELECT name FROM {twice} AS f)",
            {"why": TWO_OWNERS},
            {"twice": of_names(flag_all)},
        )
    if flag_here:
        yield Statement(
            "UPDATE gpus SET flagged = :why WHERE node_id = :node AND uuid IN (SELECT name FROM {others} AS f)",
            {"why": ANOTHERS, "node": node},
            {"others": of_names(flag_here)},
        )
    return tuple(sorted((*flag_all, *flag_here)))


@operation
def unflag(gpu: GpuId, at: Instant) -> Operation[GpuRow | None]:
    """An operator settles that this GPU is its node's owner's. The same uuid under others stays, or becomes, flagged."""
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
    """Nodes that have such a GPU now: after a flag, the scheduler has to look at them again."""
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
