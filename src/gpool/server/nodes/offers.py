"""A node's offer: its GPUs are bound to its owner and the owner's payout wallet.

A GPU bound to another owner is flagged on this node only; simulated GPUs are not bound. A site is a claim of its
owner, so it groups that owner's nodes only: a gang never mixes owners by a claim.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace

from gpool.core.errors import NotFound
from gpool.core.ids import NodeId, UserId
from gpool.core.model import Instant, Offer
from gpool.server.store.operation import operation
from gpool.server.store.operations.identity import accounts
from gpool.server.store.operations.nodes import gpu_bindings, nodes
from gpool.server.store.protocol import Operation
from gpool.server.store.values import NodeRow


def at_own_site(offer: Offer, owner: UserId, shared: Collection[str]) -> Offer:
    """Prefix the site with the owner, unless the operator shares a site of that name (`shared`)."""
    if not offer.site or offer.site in shared:
        return offer
    return replace(offer, site=f"{owner}/{offer.site}")


def site_name(site: str) -> str | None:
    return site.rpartition("/")[2] or None


@operation
def take(node: NodeId, offer: Offer, gpu_ids: Sequence[int], at: Instant) -> Operation[NodeRow]:
    yield from nodes.greet(node, offer, gpu_ids, at)
    return (yield from bind(node, offer, at))


@operation
def bind(node: NodeId, offer: Offer, at: Instant) -> Operation[NodeRow]:
    """Bind the GPUs of a written offer; return the node's row.

    A node without a key is a listing that anybody can create, so it neither binds nor flags anything.
    """
    row = yield from nodes.node(node)
    if row is None:
        raise NotFound("this node was removed; join again with a new link")
    uuids = [gpu.uuid for gpu in offer.gpus if not gpu.simulated]
    who = yield from nodes.credentials_of(node)
    if not uuids or who is None or who.public_key is None:
        return row
    wallet = yield from _payout_wallet(row.node.owner)
    flagged = yield from gpu_bindings.bind(node, row.node.owner, wallet, uuids, at)
    if flagged:
        row = yield from nodes.node(node)
        assert row is not None
    return row


def rows_with(uuids: Sequence[str]) -> Operation[tuple[NodeRow, ...]]:
    found = []
    for id_ in (yield from gpu_bindings.nodes_with(uuids)):
        row = yield from nodes.node(id_)
        if row is not None:
            found.append(row)
    return tuple(found)


def _payout_wallet(owner: UserId) -> Operation[str | None]:
    for wallet in (yield from accounts.wallets_of(owner)):
        if wallet.payout:
            return wallet.address
    return None
