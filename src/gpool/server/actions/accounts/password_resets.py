"""Password resets: a one-time link, made by an operator or sent to a confirmed mail address of the account.

The code is the account's id and 32 random bytes. The store has a hash of it and of the password's hash at that time, so
a password that was changed meanwhile makes every older link useless. Mails are sent after the answer, which is the same
for every name and takes the same time.
"""

from __future__ import annotations

import secrets

from gpool.core.errors import Conflict, Invalid, NotSignedIn, Unreachable
from gpool.core.ids import UserId, decode, encode
from gpool.core.model import SECOND, Instant, Span
from gpool.core.permissions import Action
from gpool.observability.logs import get_logger
from gpool.server.actions.audit import AuditActor, audited, entry, note_refused_sign_in
from gpool.server.events.delivery import opened
from gpool.server.events.mail import reset_mail
from gpool.server.identity.authorization import account_of, hashed, permit
from gpool.server.identity.refresh_tokens import FamilyEnd
from gpool.server.outbound import send_mail
from gpool.server.server import Server
from gpool.server.store.identity_values import Account, Caller
from gpool.server.store.operations.events import destinations
from gpool.server.store.operations.events.destinations import ON
from gpool.server.store.operations.identity import accounts as operations
from gpool.server.store.operations.identity import sessions as session_operations
from gpool.server.store.protocol import Operation, operation
from gpool.wire.documents import instant_to_datetime
from gpool.wire.identity import PasswordLinkDocument

log = get_logger(__name__)

LINK_S = 1800
LINK_LIFE = Span(LINK_S * SECOND)
MAIL_PAUSE = Span(600 * SECOND)
"""Between two mails to one account, whoever asks and whichever replica answers."""

USED = (
    "this link was used before, has expired, or the password was changed since; ask for a new one"
)


async def create(server: Server, who: Caller, id_: UserId) -> PasswordLinkDocument:
    """Link for an operator to pass on. `Conflict` for a disabled account."""
    account = await server.store.read(operations.account(id_))
    name = f"user {encode('user', id_)}"
    permit(who, Action.PASSWORD_LINK, account_of(None if account is None else id_), name)
    assert account is not None
    if account.disabled:
        raise Conflict(f"{name} is disabled; enable the account first")
    code, expires_at = await _put_link(server, account, who, "operator")
    return PasswordLinkDocument(
        url=f"{server.settings.origin}/reset/{code}", expires_at=instant_to_datetime(expires_at)
    )


async def mail(server: Server, name: str, address: str) -> None:
    """Send a link to the confirmed addresses of an account that has a password; else nothing happens.

    A mailbox must not open an account that its owner protects by a wallet or an identity provider only.
    """
    mail_server = server.settings.mail_server
    account = await server.store.read(operations.account_by_name(name))
    if mail_server is None or account is None or account.disabled or not account.password_hash:
        return
    rows = await server.store.read(
        destinations.destinations_of(("user", account.user.id), is_mail=True)
    )
    confirmed = [row for row in rows if row.status == ON]
    if not confirmed or not await server.write(_claim(account.user.id, server.now)):
        return
    code, _ = await _put_link(server, account, None, "mail", address)
    link, is_sent = f"{server.settings.origin}/reset/{code}", False
    for to in sorted({(await opened(server, row)).address for row in confirmed}):
        written = reset_mail(mail_server.sender, to, account.user.name, link, LINK_S // 60)
        try:
            await send_mail(mail_server, written)
            is_sent = True
        except Unreachable as error:
            log.warning("password reset not mailed", why=str(error))
    if not is_sent:  # the next request tries again at once
        await server.write(_release(account.user.id, server.now))


async def is_open(server: Server, code: str) -> bool:
    account = await _account_of(server, code)
    return account is not None and await server.store.read(
        operations.is_open_nonce(_nonce(code, account), _purpose(account.user.id), server.now)
    )


async def set_password(server: Server, code: str, new: str, address: str) -> None:
    """Use the link: sets the password and ends every session. `NotSignedIn` for a used, expired or unknown one."""
    account = await _account_of(server, code)
    if account is None or not await is_open(server, code):
        await note_refused_sign_in(server, address, "reset")
        raise NotSignedIn(USED)
    # A refused password leaves the link usable.
    password_hash = await server.identity.passwords.hash(account.user.name, new)
    who = encode("user", account.user.id)
    done = entry(server.now, account.user, "password.reset", who, address=address)
    changing = _reset(_nonce(code, account), account.user.id, password_hash, server.now)
    await server.write(audited(changing, [done]))
    server.credentials.forget()


@operation
def _reset(nonce: str, user: UserId, password_hash: str, at: Instant) -> Operation[None]:
    if not (yield from operations.take_nonce(nonce, _purpose(user), at)):
        raise NotSignedIn(USED)
    yield from operations.set_password(user, password_hash)
    yield from session_operations.end_sessions_of(user, FamilyEnd.REVOKED.value, at)


async def _put_link(
    server: Server, account: Account, actor: AuditActor, via: str, address: str = ""
) -> tuple[str, Instant]:
    user = encode("user", account.user.id)
    code, expires_at = f"{user}.{secrets.token_urlsafe(32)}", Instant(server.now + LINK_LIFE)
    putting = operations.put_nonce(_nonce(code, account), _purpose(account.user.id), expires_at)
    made = entry(server.now, actor, "password.link", user, address=address, via=via)
    await server.write(audited(putting, [made]))
    return code, expires_at


async def _account_of(server: Server, code: str) -> Account | None:
    try:
        id_ = UserId(decode("user", code.partition(".")[0]))
    except Invalid:
        return None
    account = await server.store.read(operations.account(id_))
    return None if account is None or account.disabled else account


def _claim(user: UserId, at: Instant) -> Operation[bool]:
    mark = _mailed(user)
    return operations.claim_nonce(hashed(mark), mark, Instant(at + MAIL_PAUSE), at)


def _release(user: UserId, at: Instant) -> Operation[bool]:
    mark = _mailed(user)
    return operations.take_nonce(hashed(mark), mark, at)


def _mailed(user: UserId) -> str:
    return f"mailed {encode('user', user)}"


def _nonce(code: str, account: Account) -> str:
    return hashed(f"{code} {account.password_hash or ''}")


def _purpose(user: UserId) -> str:
    return f"reset {encode('user', user)}"
