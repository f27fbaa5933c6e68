"""What happens when a node says what it lends: its GPUs are bound to its owner and the owner's payout wallet.

One that is another owner's already is flagged, on their node too; simulated ones have no hardware uuid and are not bound.
A site is a claim, so it holds among the nodes of one owner only: gangs never mix owners by a stranger's word.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace

from gpool.core.errors import NotFound
from gpool.core.ids import NodeId, UserId
from gpool.core.model import Instant, Offer
from gpool.server.store.operation import operation
from gpool.server.store.operations import accounts, bindings, nodes
from gpool.server.store.protocol import Operation
from gpool.server.store.values import NodeRow


def at_own_site(offer: Offer, owner: UserId, shared: Collection[str]) -> Offer:
    """As it is kept: its site is its owner's own, unless the operator shares one of that name (`shared`)."""
    if not offer.site or offer.site in shared:
        return offer
    return replace(offer, site=f"{owner}/{offer.site}")


def site_name(site: str) -> str | None:
    """As its owner named it."""
    return site.rpartition("/")[2] or None


@operation
def take(
    node: NodeId, offer: Offer, gpu_ids: Sequence[int], at: Instant
) -> Operation[tuple[NodeRow, ...]]:
    """The node's row, then those of other nodes that a new flag concerns."""
    yield from nodes.greet(node, offer, gpu_ids, at)
    return (yield from bind(node, offer, at))


@operation
def bind(node: NodeId, offer: Offer, at: Instant) -> Operation[tuple[NodeRow, ...]]:
    """The same for an offer that was written with the node."""
    row = yield from nodes.node(node)
    if row is None:
        raise NotFound("this node was removed; join again with a new link")
    uuids = [gpu.uuid for gpu in offer.gpus if not gpu.simulated]
    if not uuids:
        return (row,)
    before = row.node.gpus_flagged
    wallet = yield from _payout_wallet(row.node.owner)
    flagged = yield from bindings.bind(node, row.node.owner, wallet, uuids, at)
    if not flagged:
        return (row,)
    now_flagged = yield from nodes.node(node)
    assert now_flagged is not None
    if now_flagged.node.gpus_flagged == before:
        return (now_flagged,)
    return (now_flagged, *(yield from rows_with(flagged, but=node)))


def rows_with(uuids: Sequence[str], but: NodeId | None = None) -> Operation[tuple[NodeRow, ...]]:
    """Nodes that have such a GPU: the scheduler has to look at them again."""
    found = []
    for id_ in (yield from bindings.nodes_with(uuids)):
        row = None if id_ == but else (yield from nodes.node(id_))
        if row is not None:
            found.append(row)
    return tuple(found)


def _payout_wallet(owner: UserId) -> Operation[str | None]:
    for wallet in (yield from accounts.wallets_of(owner)):
        if wallet.payout:
            return wallet.address
    return None
