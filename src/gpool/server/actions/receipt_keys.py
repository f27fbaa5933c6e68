"""Receipt keys: read their history, replace the current one. Routes check the permission."""

from __future__ import annotations

from gpool.core.errors import NotFound
from gpool.server.actions.audit import audited, entry
from gpool.server.server import Once, Server
from gpool.server.store.identity_values import Caller
from gpool.wallet.receipt_keys import KeyHistory, key_id, parse_history


async def history(server: Server) -> KeyHistory:
    """`NotFound` before the first key."""
    found = await server.identity.receipts.history()
    if found is None:
        raise NotFound(
            "this pool has no receipt keys; an operator creates the first one with: "
            "gpool admin receipt-keys rotate"
        )
    return found


async def rotate(server: Server, who: Caller, once: Once | None) -> KeyHistory:
    """Replace the current key, or create the first one; return the new history."""
    rotation = await server.identity.receipts.rotation(server.now)
    new = key_id(rotation.history.keys[-1].public)
    noted = audited(rotation.operation, [entry(server.now, who, "receipt_keys.rotate", new)])
    answered = await server.write_once(who.user, once, noted, lambda _: rotation.history.to_bytes())
    return parse_history(answered.body)
