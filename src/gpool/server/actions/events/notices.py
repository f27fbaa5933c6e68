"""Mail notices of a user: addresses, confirmed by a code that is sent to them."""

from __future__ import annotations

import secrets

from gpool.core.errors import Conflict, Invalid, NotFound, Unreachable
from gpool.core.ids import decode, encode
from gpool.core.permissions import Action
from gpool.core.specs.events import kinds_text
from gpool.server.actions.audit import audited, entry
from gpool.server.actions.events.webhooks import kind_list, new_destination
from gpool.server.events.delivery import opened, place_of
from gpool.server.events.mail import code_mail
from gpool.server.events.webhooks import DestinationSecrets
from gpool.server.identity.audit import OK
from gpool.server.identity.authorization import own, permit
from gpool.server.outbound import send_mail
from gpool.server.server import Once, Server
from gpool.server.store.generated_rows import DestinationsRecord
from gpool.server.store.identity_values import Caller
from gpool.server.store.operations.events import destinations
from gpool.server.store.operations.events.destinations import MAIL, ON, UNCONFIRMED
from gpool.wire.documents import instant_to_datetime
from gpool.wire.events import NoticeConfirmation, NoticeDocument, NoticePage, NoticeRequest


async def notices(server: Server, who: Caller) -> NoticePage:
    permit(who, Action.NOTICES_READ, own(who))
    rows = await server.store.read(
        destinations.destinations_of(("user", who.user.id), is_mail=True)
    )
    return NoticePage(items=[await _document(server, row) for row in rows])


async def add(
    server: Server, who: Caller, wanted: NoticeRequest, once: Once | None
) -> NoticeDocument:
    """Add an address and send it a code. Nothing else is sent there until it is confirmed."""
    permit(who, Action.NOTICE_CHANGE, own(who))
    kinds = kinds_text(wanted.kinds)
    mail_server = server.settings.mail_server
    if mail_server is None:
        raise Conflict("this pool sends no mail; its operator can set GPOOL_SERVER_SMTP_HOST")
    id_, code = server.ids.next(), f"{secrets.randbelow(10**8):08d}"
    held = DestinationSecrets(wanted.address)
    sealed = await server.sealer.seal(place_of(id_), held.encoded())
    row = new_destination(
        id_,
        ("user", who.user.id),
        MAIL,
        kinds,
        sealed,
        UNCONFIRMED,
        server.now,
        _mark(server, id_, code),
    )
    fact = entry(server.now, who, "notice.add", encode("notice", id_), kinds=kinds)
    operation = audited(destinations.add_destination(row), [fact])
    answered = await server.write_once(who.user, once, operation, lambda _: b"%d" % id_)
    if int(answered.body) != id_:  # repeated: the code is on its way
        return await _document(server, await _own(server, who, int(answered.body)))
    mail = code_mail(
        mail_server.sender, wanted.address, who.user.name, code, server.settings.origin
    )
    try:
        await send_mail(mail_server, mail)
    except Unreachable:
        await server.write(destinations.delete_destination(id_))
        raise
    return await _document(server, row)


async def confirm(
    server: Server, who: Caller, id_: int, wanted: NoticeConfirmation
) -> NoticeDocument:
    """Switch mails to an address on; `Invalid` for a wrong code, the fifth of which deletes the address."""
    permit(who, Action.NOTICE_CHANGE, own(who))
    await _own(server, who, id_)
    name, at = encode("notice", id_), server.now
    operation = destinations.confirm(id_, _mark(server, id_, wanted.code), at)
    facts = {True: OK, False: "wrong code"}
    is_right = await server.write(
        audited(
            operation,
            lambda right: [entry(at, who, "notice.confirm", name, outcome=facts[right])],
        )
    )
    row = await server.store.read(destinations.destination(id_))
    if row is None or not (is_right or row.status == ON):
        raise Invalid("the code is wrong; after five wrong codes the address is deleted")
    await server.events.subscribers.refresh(server.store, server.now)
    return await _document(server, row)


async def remove(server: Server, who: Caller, id_: int, once: Once | None) -> None:
    permit(who, Action.NOTICE_CHANGE, own(who))
    await _own(server, who, id_)
    fact = entry(server.now, who, "notice.remove", encode("notice", id_))
    operation = audited(destinations.delete_destination(id_), [fact])
    await server.write_once(who.user, once, operation, lambda _: b"")
    await server.events.subscribers.refresh(server.store, server.now)


def notice_id(text: str) -> int:
    return decode("notice", text)


async def _own(server: Server, who: Caller, id_: int) -> DestinationsRecord:
    row = await server.store.read(destinations.destination(id_))
    if row is None or row.form != MAIL or (row.holder_kind, row.holder_id) != ("user", who.user.id):
        raise NotFound(f"no address {encode('notice', id_)} of yours")
    return row


def _mark(server: Server, id_: int, code: str) -> str:
    return server.sealer.mark(b"notice", str(id_).encode(), code.encode())


async def _document(server: Server, row: DestinationsRecord) -> NoticeDocument:
    return NoticeDocument(
        id=encode("notice", row.id),
        address=(await opened(server, row)).address,
        kinds=kind_list(row.kinds),
        confirmed=row.status == ON,
        created_at=instant_to_datetime(row.created_at),
    )
