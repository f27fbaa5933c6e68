"""One-time links that open the page signed in, for an operator at the server's own machine (`gpool up` prints one).

The code is 32 random bytes and the account's id. The store has its hash only, as a nonce for this purpose and account.
"""

from __future__ import annotations

import secrets

from gpool.core.errors import Forbidden, Invalid, NotSignedIn
from gpool.core.ids import UserId, decode, encode
from gpool.core.model import Instant, Permission
from gpool.core.permissions import Action
from gpool.server.actions.accounts import sessions
from gpool.server.actions.audit import audited, entry, note_refused_sign_in
from gpool.server.identity.authorization import hashed, own, permit
from gpool.server.server import Server
from gpool.server.settings import span
from gpool.server.store.identity_values import Caller
from gpool.server.store.operations.identity import accounts as operations
from gpool.transfer.requests import is_loopback
from gpool.wire.documents import instant_to_datetime
from gpool.wire.identity import SignInLinkDocument

USED = (
    "this link was used before or has expired; start `gpool up` again, or sign in with a password"
)


async def create(server: Server, who: Caller) -> SignInLinkDocument:
    permit(who, Action.SIGN_IN_LINK, own(who))
    user = encode("user", who.user.id)
    code = f"{user}.{secrets.token_urlsafe(32)}"
    expires_at = Instant(server.now + span(server.settings.nonce_s))
    putting = operations.put_nonce(hashed(code), _purpose(user), expires_at)
    made = entry(server.now, who, "session.link", user)
    await server.write(audited(putting, [made]))
    return SignInLinkDocument(path=f"/in/{code}", expires_at=instant_to_datetime(expires_at))


async def open_link(server: Server, code: str, label: str, address: str) -> str:
    """Use the link; returns the cookie of the new session. `NotSignedIn` for a used or unknown one."""
    if not is_loopback(address):
        raise Forbidden("this link opens only in a browser on the server's own machine")
    user = code.partition(".")[0]
    try:
        id_ = UserId(decode("user", user))
    except Invalid:
        raise NotSignedIn(USED) from None
    if not await server.write(operations.take_nonce(hashed(code), _purpose(user), server.now)):
        await note_refused_sign_in(server, address, "link")
        raise NotSignedIn(USED)
    account = await server.store.read(operations.account(id_))
    if account is None or Permission.OPERATOR not in account.user.permissions:
        raise NotSignedIn(USED)
    return await sessions.open_browser_session(server, account, label, address, "link")


def _purpose(user: str) -> str:
    return f"page {user}"
