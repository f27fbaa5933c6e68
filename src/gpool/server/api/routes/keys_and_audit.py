"""Routes for operators: the server's keys and the audit record."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Query
from starlette.requests import Request
from starlette.responses import Response

from gpool.core.errors import Invalid
from gpool.core.permissions import Action
from gpool.server.actions.operators import audit, server_keys
from gpool.server.api.openapi import body, ok
from gpool.server.api.requests import Limit, address_of, body_of, parsed, server_of, user_of
from gpool.server.api.responses import answer
from gpool.server.identity.audit import AuditAnchor, AuditLink, ChainIntact
from gpool.server.identity.secrets.sealer import KeyStatus
from gpool.wire.admin import AuditCheck, AuditDocument, AuditPage, KeysDocument, RotateRequest
from gpool.wire.documents import instant_to_datetime

router = APIRouter(tags=["operators"])


@router.get("/v1/admin/keys", responses=ok(KeysDocument), response_class=Response)
async def get_keys(request: Request) -> Response:
    """The keys that seal what is secret here, and how far a rotation is."""
    await user_of(request, Action.POLICY_READ)
    return answer(_keys(await server_of(request).sealer.status()))


@router.post(
    "/v1/admin/keys/rotate",
    status_code=202,
    openapi_extra=body(RotateRequest, required=False),
    responses={202: {"model": KeysDocument, "description": "Begun; it goes on while we serve"}},
    response_class=Response,
)
async def rotate_keys(request: Request) -> Response:
    """A new data key; everything sealed is moved to it. Asking again begins another."""
    user = await user_of(request, Action.KEYS_ROTATE)
    wanted = parsed(RotateRequest, await body_of(request))
    server, address = server_of(request), address_of(request)
    status = await server_keys.rotate_keys(server, user, master=wanted.master, address=address)
    return answer(_keys(status), 202)


@router.get(
    "/v1/audit",
    responses={
        200: {
            "model": AuditPage | AuditCheck,
            "description": "A page, newest first; with `verify`, whether the record is whole",
        }
    },
    response_class=Response,
)
async def get_audit(
    request: Request,
    limit: Limit = 50,
    cursor: Annotated[int | None, Query(ge=1, le=(1 << 63) - 1)] = None,
    verify: bool = False,
    anchor: Annotated[list[str] | None, Query(max_length=100)] = None,
) -> Response:
    """Who did what. `anchor` (NUMBER:HASH, any number of them) are heads you kept: `verify` takes them along."""
    await user_of(request, Action.AUDIT_READ)
    server = server_of(request)
    if verify:
        return answer(await _checked(request, [_anchor(text) for text in anchor or []]))
    links = await audit.page(server, cursor, limit)
    more = str(links[-1].entry.sequence) if len(links) == limit else None
    return answer(AuditPage(items=[_entry(link) for link in links], next=more))


async def _checked(request: Request, anchors: list[AuditAnchor]) -> AuditCheck:
    found = await audit.verify(server_of(request), anchors)
    if isinstance(found, ChainIntact):
        head = f"{found.head.sequence}:{found.head.hash.hex()}"
        return AuditCheck(whole=True, entries=found.head.sequence, head=head)
    return AuditCheck(whole=False, entries=found.sequence - 1, why=found.why)


def _anchor(text: str) -> AuditAnchor:
    number, _, digest = text.partition(":")
    try:
        return AuditAnchor(int(number), bytes.fromhex(digest))
    except ValueError:
        raise Invalid(f"{text[:80]!r} is not an anchor: NUMBER:HASH, as `verify` told it") from None


def _keys(status: KeyStatus) -> KeysDocument:
    return KeysDocument(
        data_keys=status.data_keys,
        retired=status.retired,
        fields=status.fields,
        left=status.left,
        masters=status.masters,
    )


def _entry(link: AuditLink) -> AuditDocument:
    entry = link.entry
    return AuditDocument(
        number=entry.sequence,
        at=instant_to_datetime(entry.at),
        actor=entry.actor,
        action=entry.action,
        thing=entry.thing,
        outcome=entry.outcome,
        address=entry.address,
        facts=dict(entry.facts),
        hash=link.hash.hex(),
    )
