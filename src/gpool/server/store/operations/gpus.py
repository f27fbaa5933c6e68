"""GPUs: bindings of a hardware uuid to its owner and wallet, measurements, verification results.

A connected node binds an unbound uuid to its owner: by naming it where GPUs are not verified, else when that GPU passes
its verification (`proof`), so that nobody can hold a uuid by knowing it. A claim by another owner flags only the
claimant's row, which is not scheduled until an operator decides or the holder's claim is gone (its nodes removed, its
account disabled or not allowed to lend); if the holder's rows were flagged too, any account could take a GPU out of the
pool by naming its uuid. One file, because a verdict binds and a binding asks for the verdict.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from gpool.core.gpu_verification import GpuVerdict
from gpool.core.ids import GpuId, NodeId, UserId
from gpool.core.model import Instant
from gpool.server.store.generated_rows import GpuBindingsRecord
from gpool.server.store.identity_values import Binding, GpuRow
from gpool.server.store.operations import nodes
from gpool.server.store.protocol import Operation, Relation, Statement, operation
from gpool.server.store.rows import columns, exists, of_ids, of_names, select, values
from gpool.server.store.values import NodeRow

TAKEN = "this GPU's uuid is bound to another owner, who claimed it first; an operator can decide otherwise"
ANOTHERS = "an operator decided that this GPU is another owner's"
WAITS = "it has not proved yet what it claims; its trial comes"
"""Reason why a GPU is withheld until its verification, which selects by it."""

BINDING = columns(GpuBindingsRecord, GpuBindingsRecord, "b")
GPU = (
    "g.id, g.node_id, n.owner_id, g.uuid, g.position, g.available, g.gone, g.flagged, g.quarantined, "
    "g.unproven, g.measured, g.verdict"
)


class _OwnedGpu(NamedTuple):
    id: GpuId
    node_id: NodeId
    owner_id: UserId
    uuid: str
    position: int
    available: int
    gone: int
    flagged: str | None
    quarantined: str | None
    unproven: str | None
    measured: str | None
    verdict: str | None


@operation
def bind(
    node: NodeId,
    owner: UserId,
    wallet: str | None,
    uuids: Collection[str],
    at: Instant,
    *,
    proof: bool = False,
) -> Operation[tuple[str, ...]]:
    """Bind unbound uuids to `owner`; flag this node's rows of the others and return their uuids, sorted.

    `proof`: bind only GPUs whose verification passed. Call it for a connected node. Do not pass simulated GPUs: their
    uuids identify no device. A flagged row stays flagged while the binding is another's.
    """
    if not uuids:
        return ()
    wanted = {"wanted": of_names(uuids)}
    yield from _drop_abandoned(uuids)
    may_bind = (
        "EXISTS (SELECT 1 FROM gpus g WHERE g.node_id = :node AND g.uuid = w.name AND g.verdict = 'passed')"
        if proof
        else "EXISTS (SELECT 1 FROM nodes n WHERE n.id = :node)"
    )
    yield Statement(
        "INSERT INTO gpu_bindings (uuid, owner_id, wallet, bound_at) "  # noqa: S608
        "SELECT w.name, CAST(:owner AS BIGINT), CAST(:wallet AS TEXT), CAST(:at AS BIGINT) "
        f"FROM {{wanted}} AS w WHERE {may_bind} ON CONFLICT (uuid) DO NOTHING",
        {"owner": owner, "wallet": wallet, "node": node, "at": at},
        wanted,
    )
    # Locked, so that an operator who decides for this owner meanwhile is not overruled by the flag below.
    rows = yield from select(
        GpuBindingsRecord,
        f"SELECT {BINDING} FROM {{wanted}} AS w JOIN gpu_bindings b ON b.uuid = w.name "  # noqa: S608
        "/*postgresql ORDER BY b.uuid FOR UPDATE OF b*/",
        {},
        wanted,
    )
    mine = [row.uuid for row in rows if row.owner_id == owner]
    others = [row for row in rows if row.owner_id != owner]
    taken = [row.uuid for row in others if row.settled_at is None]
    settled = [row.uuid for row in others if row.settled_at is not None]
    if mine:
        yield Statement(
            "UPDATE gpu_bindings SET wallet = :wallet WHERE owner_id = :owner "
            "AND uuid IN (SELECT name FROM {mine} AS m)",
            {"wallet": wallet, "owner": owner},
            {"mine": of_names(mine)},
        )
    not_others = sorted(set(uuids).difference(taken, settled))
    if not_others:
        yield Statement(
            "UPDATE gpus SET flagged = NULL WHERE node_id = :node AND flagged = :taken "
            "AND uuid IN (SELECT name FROM {these} AS t)",
            {"node": node, "taken": TAKEN},
            {"these": of_names(not_others)},
        )
    for why, claimed in ((TAKEN, taken), (ANOTHERS, settled)):
        if claimed:
            yield Statement(
                "UPDATE gpus SET flagged = :why WHERE node_id = :node AND uuid IN (SELECT name FROM {claimed} AS c)",
                {"why": why, "node": node},
                {"claimed": of_names(claimed)},
            )
    return tuple(sorted((*taken, *settled)))


@dataclass(frozen=True, slots=True)
class Claimants:
    """Nodes that may take over a binding whose holder's claim is gone."""

    connected: frozenset[NodeId]
    proof: bool = False  # only if the GPU's verification passed


def payout_wallet(owner: UserId) -> Operation[str | None]:
    sql = "SELECT address FROM wallets WHERE user_id = :owner AND payout = 1"
    found = yield from values(str, sql, {"owner": owner})
    return found[0] if found else None


class _Claim(NamedTuple):
    uuid: str
    owner_id: UserId
    node_id: NodeId
    verdict: str | None


_MAY_NOT_LEND = (
    "SELECT 1 FROM users u WHERE u.id = n.owner_id AND (u.disabled_at IS NOT NULL "
    "OR ',' || u.permissions || ',' NOT LIKE '%,provider,%')"
)


def _drop_abandoned(uuids: Collection[str]) -> Operation[list[str]]:
    """Delete bindings of owners who have no node with that uuid any more; an operator's decision stays."""
    return (
        yield from values(
            str,
            "DELETE FROM gpu_bindings WHERE uuid IN (SELECT name FROM {wanted} AS w) AND settled_at IS NULL "  # noqa: S608
            "AND NOT EXISTS (SELECT 1 FROM gpus g JOIN nodes n ON n.id = g.node_id WHERE g.uuid = gpu_bindings.uuid "
            f"AND n.owner_id = gpu_bindings.owner_id AND NOT EXISTS ({_MAY_NOT_LEND})) RETURNING uuid",
            {},
            {"wanted": of_names(uuids)},
        )
    )


@operation
def uuids_of(node: NodeId) -> Operation[tuple[str, ...]]:
    found = yield from values(
        str, "SELECT uuid FROM gpus WHERE node_id = :node ORDER BY uuid", {"node": node}
    )
    return tuple(found)


@operation
def lapse(uuids: Collection[str], at: Instant, claimants: Claimants) -> Operation[tuple[str, ...]]:
    """Give bindings that nobody claims any more to the earliest of the claimants; clear the flags of that owner's rows,
    or of all rows where nobody may bind. Return the uuids whose flags changed, sorted.

    Call it after nodes with these uuids were removed or their owner was suspended.
    """
    if not uuids:
        return ()
    freed = yield from _drop_abandoned(uuids)
    if not freed:
        return ()
    claims = yield from select(
        _Claim,
        "SELECT g.uuid, n.owner_id, n.id AS node_id, g.verdict FROM {freed} AS f JOIN gpus g ON g.uuid = f.name "  # noqa: S608
        f"JOIN nodes n ON n.id = g.node_id WHERE g.flagged IN (:taken, :anothers) "
        f"AND NOT EXISTS ({_MAY_NOT_LEND}) ORDER BY g.id DESC",
        {"taken": TAKEN, "anothers": ANOTHERS},
        {"freed": of_names(freed)},
    )
    bound = {
        claim.uuid: claim.owner_id
        for claim in claims
        if claim.node_id in claimants.connected
        and (claim.verdict == GpuVerdict.PASSED or not claimants.proof)
    }
    if bound:
        relation = Relation((("uuid", "text"), ("owner", "int")), sorted(bound.items()))
        yield Statement(
            "INSERT INTO gpu_bindings (uuid, owner_id, wallet, bound_at) SELECT c.uuid, c.owner, "
            "(SELECT w.address FROM wallets w WHERE w.user_id = c.owner AND w.payout = 1), CAST(:at AS BIGINT) "
            "FROM {claims} AS c WHERE true ON CONFLICT (uuid) DO NOTHING",
            {"at": at},
            {"claims": relation},
        )
    unflagged = sorted(
        {
            (claim.uuid, claim.owner_id)
            for claim in claims
            if bound.get(claim.uuid, claim.owner_id) == claim.owner_id
        }
    )
    if not unflagged:
        return ()
    yield Statement(
        "UPDATE gpus SET flagged = NULL FROM {claims} AS c WHERE gpus.uuid = c.uuid "
        "AND gpus.flagged IN (:taken, :anothers) AND gpus.node_id IN (SELECT n.id FROM nodes n WHERE n.owner_id = c.owner)",
        {"taken": TAKEN, "anothers": ANOTHERS},
        {"claims": Relation((("uuid", "text"), ("owner", "int")), unflagged)},
    )
    return tuple(sorted({uuid for uuid, _ in unflagged}))


_IS_SIMULATED = "SELECT 1 FROM gpus WHERE id = :gpu AND verdict = :simulated"


@operation
def unflag(gpu: GpuId, at: Instant) -> Operation[GpuRow | None]:
    """Admit a GPU by an operator's decision: bind its uuid to its owner and flag the uuid's rows of other owners.

    A simulated GPU is admitted only: its uuid identifies no device, others have the same one.
    """
    found = yield from _gpus("g.id = :gpu", gpu=gpu)
    if not found:
        return None
    is_simulated = yield from exists(
        _IS_SIMULATED, {"gpu": gpu, "simulated": GpuVerdict.SIMULATED.value}
    )
    yield Statement("UPDATE gpus SET unproven = NULL WHERE id = :gpu", {"gpu": gpu})
    if is_simulated:
        return (yield from _gpus("g.id = :gpu", gpu=gpu))[0]
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
    yield Statement("UPDATE gpus SET quarantined = :why WHERE id = :gpu", {"why": why, "gpu": gpu})
    found = yield from _gpus("g.id = :gpu", gpu=gpu)
    return found[0] if found else None


@operation
def binding(uuid: str) -> Operation[Binding | None]:
    rows = yield from select(
        GpuBindingsRecord,
        f"SELECT {BINDING} FROM gpu_bindings b WHERE b.uuid = :uuid",  # noqa: S608
        {"uuid": uuid},
    )
    return Binding(*rows[0]) if rows else None


@operation
def rebind_wallet(owner: UserId, wallet: str | None) -> Operation[int]:
    changed = yield from values(
        str,
        "UPDATE gpu_bindings SET wallet = :wallet WHERE owner_id = :owner RETURNING uuid",
        {"wallet": wallet, "owner": owner},
    )
    return len(changed)


@operation
def nodes_with(uuids: Collection[str]) -> Operation[tuple[NodeId, ...]]:
    found = yield from values(
        NodeId,
        "SELECT DISTINCT g.node_id FROM {wanted} AS w JOIN gpus g ON g.uuid = w.name "
        "WHERE g.gone = 0 ORDER BY g.node_id",
        {},
        {"wanted": of_names(uuids)},
    )
    return tuple(found)


def _gpus(where: str, **parameters: int) -> Operation[tuple[GpuRow, ...]]:
    rows = yield from select(
        _OwnedGpu,
        f"SELECT {GPU} FROM gpus g JOIN nodes n ON n.id = g.node_id WHERE {where} ORDER BY g.node_id, g.position",  # noqa: S608
        parameters,
    )
    return tuple(_gpu(row) for row in rows)


def _gpu(row: _OwnedGpu) -> GpuRow:
    return GpuRow(
        row.id,
        row.node_id,
        row.owner_id,
        row.uuid,
        row.position,
        bool(row.available),
        bool(row.gone),
        row.flagged,
        row.quarantined,
        row.unproven,
        row.measured,
        row.verdict == GpuVerdict.PASSED,
    )


@operation
def gpu(id: GpuId) -> Operation[GpuRow | None]:
    found = yield from _gpus("g.id = :gpu", gpu=id)
    return found[0] if found else None


@operation
def gpu_rows(owner: UserId | None = None) -> Operation[tuple[GpuRow, ...]]:
    if owner is None:
        return (yield from _gpus("g.gone = 0"))
    return (yield from _gpus("g.gone = 0 AND n.owner_id = :owner", owner=owner))


@operation
def flagged() -> Operation[tuple[GpuRow, ...]]:
    return (yield from _gpus("g.flagged IS NOT NULL"))


@operation
def gpus_of_nodes(nodes: Collection[NodeId]) -> Operation[tuple[GpuRow, ...]]:
    if not nodes:
        return ()
    rows = yield from select(
        _OwnedGpu,
        f"SELECT {GPU} FROM {{wanted}} AS w JOIN gpus g ON g.node_id = w.id JOIN nodes n ON n.id = g.node_id "  # noqa: S608
        "WHERE g.gone = 0 ORDER BY g.node_id, g.position",
        {},
        {"wanted": of_ids(nodes)},
    )
    return tuple(_gpu(row) for row in rows)


@dataclass(frozen=True, slots=True)
class GpuVerificationRecord:
    node: NodeId
    owner: UserId
    uuid: str
    position: int
    joined_at: Instant  # of its node
    unproven: str | None
    verdict: GpuVerdict | None
    judged_at: Instant | None
    measured: str | None


class _VerifiedGpu(NamedTuple):
    node_id: NodeId
    owner_id: UserId
    uuid: str
    position: int
    created_at: Instant
    unproven: str | None
    verdict: str | None
    judged_at: Instant | None
    measured: str | None


@operation
def records(of: Collection[NodeId]) -> Operation[tuple[GpuVerificationRecord, ...]]:
    """Return the offered GPUs of these nodes, in the order of nodes and positions."""
    rows = yield from select(
        _VerifiedGpu,
        "SELECT g.node_id, n.owner_id, g.uuid, g.position, n.created_at, g.unproven, g.verdict, g.judged_at, g.measured "
        "FROM {of} AS o JOIN nodes n ON n.id = o.id JOIN gpus g ON g.node_id = n.id "
        "WHERE g.gone = 0 ORDER BY g.node_id, g.position",
        {},
        {"of": of_ids(of)},
    )
    return tuple(
        GpuVerificationRecord(
            row.node_id,
            row.owner_id,
            row.uuid,
            row.position,
            row.created_at,
            row.unproven,
            None if row.verdict is None else GpuVerdict(row.verdict),
            row.judged_at,
            row.measured,
        )
        for row in rows
    )


@operation
def keep_back(node: NodeId, uuids: Sequence[str], why: str) -> Operation[NodeRow | None]:
    yield Statement(
        "UPDATE gpus SET unproven = :why, verdict = NULL WHERE node_id = :node "
        "AND uuid IN (SELECT name FROM {these} AS t)",
        {"why": why, "node": node},
        {"these": of_names(uuids)},
    )
    return (yield from nodes.node(node))


@operation
def withhold_changed(node: NodeId, uuids: Collection[str]) -> Operation[None]:
    """Withhold the node's GPUs that were not verified yet, and those (`uuids`) that are claimed to be something else now."""
    yield Statement(
        "UPDATE gpus SET unproven = :why WHERE node_id = :node AND gone = 0 AND verdict IS NULL",
        {"why": WAITS, "node": node},
    )
    if uuids:
        yield Statement(
            "UPDATE gpus SET unproven = :why, verdict = NULL, measured = NULL WHERE node_id = :node "
            "AND uuid IN (SELECT name FROM {changed} AS c)",
            {"why": WAITS, "node": node},
            {"changed": of_names(uuids)},
        )


@operation
def judge(node: NodeId, uuid: str, verdict: GpuVerdict, at: Instant) -> Operation[NodeRow | None]:
    """Record a verdict. A GPU that passed is bound to its owner, unless its uuid is bound to another."""
    why = None if verdict is GpuVerdict.PASSED else f"proof of GPU: {verdict.text}"
    yield Statement(
        "UPDATE gpus SET unproven = :why, verdict = :verdict, judged_at = :at WHERE node_id = :node AND uuid = :uuid",
        {"why": why, "verdict": verdict.value, "at": at, "node": node, "uuid": uuid},
    )
    row = yield from nodes.node(node)
    if row is None or verdict is not GpuVerdict.PASSED:
        return row
    wallet = yield from payout_wallet(row.node.owner)
    yield from bind(node, row.node.owner, wallet, [uuid], at, proof=True)
    return (yield from nodes.node(node))


@operation
def note_measured(node: NodeId, uuid: str, measured: str) -> Operation[None]:
    yield Statement(
        "UPDATE gpus SET measured = :measured WHERE node_id = :node AND uuid = :uuid",
        {"measured": measured, "node": node, "uuid": uuid},
    )
