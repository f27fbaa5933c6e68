"""REST documents for operators: the server's keys, the audit record."""

from __future__ import annotations

from pydantic import AwareDatetime

from gpool.wire.documents import Answer, Document


class RotateRequest(Document):
    """`POST /v1/admin/keys/rotate`."""

    master: bool = False  # also a new master key


class KeysDocument(Answer):
    """How far a rotation is: done when `left` is 0."""

    data_keys: int
    retired: int
    fields: int
    left: int
    masters: int


class AuditDocument(Answer):
    number: int
    at: AwareDatetime
    actor: str
    action: str
    thing: str
    outcome: str
    address: str
    facts: dict[str, str]
    hash: str


class AuditPage(Answer):
    """Newest first."""

    items: list[AuditDocument]
    next: str | None = None


class AuditCheck(Answer):
    """`GET /v1/audit?verify=true`: whether the record is as it was written; keep `head` where nobody here can change it."""

    whole: bool
    entries: int  # up to the first that is wrong
    head: str = ""
    why: str = ""
