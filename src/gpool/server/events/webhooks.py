"""Requests of webhooks in the form of Standard Webhooks, and the bodies that chat services expect. Pure.

The signed text is `ID.TIMESTAMP.BODY`. `v1` is an HMAC-SHA256 under the shared secret, `v1a` an Ed25519 signature.
During a rotation both secrets sign, and the header has one signature for each.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import json
import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import Any

import msgspec
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from gpool.core.ids import encode
from gpool.core.model import SECOND, Instant, Span
from gpool.core.specs.events import EventKind
from gpool.server.store.generated_rows import EventsRecord
from gpool.wire.documents import instant_to_datetime
from gpool.wire.events import PoolEvent

SECRET_BYTES = 32
SECRET_PREFIX, PUBLIC_PREFIX = "whsec_", "whpk_"
NTFY_PRIORITY = {
    EventKind.TASK_FAILED: "high",
    EventKind.ALERT_FIRING: "high",
    EventKind.NODE_LOST: "high",
    EventKind.GPU_UNHEALTHY: "high",
}


@dataclass(frozen=True, slots=True)
class SigningSecret:
    """Secret of `v1` and seed of the key of `v1a`, both base64."""

    secret: str
    seed: str


@dataclass(frozen=True, slots=True)
class DestinationSecrets:
    """Sealed part of a destination. `previous` signs too until `previous_until`."""

    address: str
    current: SigningSecret | None = field(default=None, repr=False)
    previous: SigningSecret | None = field(default=None, repr=False)
    previous_until: Instant | None = None

    def rotated(self, until: Instant) -> DestinationSecrets:
        return replace(self, current=new_secret(), previous=self.current, previous_until=until)

    def encoded(self) -> bytes:
        return msgspec.json.encode(self)

    @classmethod
    def decoded(cls, data: bytes) -> DestinationSecrets:
        return msgspec.json.decode(data, type=cls)


def new_secret() -> SigningSecret:
    return SigningSecret(
        _base64(secrets.token_bytes(SECRET_BYTES)), _base64(secrets.token_bytes(32))
    )


def shown_secret(secret: SigningSecret) -> str:
    return SECRET_PREFIX + secret.secret


def public_key(secret: SigningSecret) -> str:
    key = Ed25519PrivateKey.from_private_bytes(base64.b64decode(secret.seed))
    return PUBLIC_PREFIX + _base64(key.public_key().public_bytes_raw())


def _base64(data: bytes) -> str:
    return base64.b64encode(data).decode()


def signatures(
    held: DestinationSecrets, id_: str, timestamp: int, body: bytes, now: Instant
) -> str:
    """Value of the header `webhook-signature`: newest secret first."""
    signing = [held.current]
    if held.previous_until is not None and now < held.previous_until:
        signing.append(held.previous)
    text = f"{id_}.{timestamp}.".encode() + body
    found = []
    for secret in signing:
        if secret is None:
            continue
        digest = hmac.new(base64.b64decode(secret.secret), text, hashlib.sha256).digest()
        key = Ed25519PrivateKey.from_private_bytes(base64.b64decode(secret.seed))
        found += [f"v1,{_base64(digest)}", f"v1a,{_base64(key.sign(text))}"]
    return " ".join(found)


# ---- bodies


def event_document(row: EventsRecord) -> PoolEvent:
    holder = None if row.holder_kind == "pool" else encode(row.holder_kind, row.holder_id)
    return PoolEvent(
        id=encode("event", row.number),
        type=row.kind,
        timestamp=instant_to_datetime(row.at),
        account=holder,
        data=json.loads(row.data),
    )


@dataclass(frozen=True, slots=True)
class WebhookRequestBody:
    body: bytes
    headers: Mapping[str, str]


def webhook_request(
    form: str, event: PoolEvent, held: DestinationSecrets, now: Instant
) -> WebhookRequestBody:
    """Body and headers of one attempt. Signatures are sent in every form."""
    headers = {"user-agent": "gpool", "content-type": "application/json"}
    match form:
        case "slack":
            body = _json({"text": line_of(event)})
        case "discord":
            body = _json({"content": line_of(event)[:2000], "allowed_mentions": {"parse": []}})
        case "ntfy":
            body = line_of(event).encode()
            headers["content-type"] = "text/plain; charset=utf-8"
            headers["title"] = f"gpool: {event.type}"
            headers["priority"] = NTFY_PRIORITY.get(EventKind(event.type), "default")
        case _:
            body = event.model_dump_json().encode()
    timestamp = now // SECOND
    headers["webhook-id"] = event.id
    headers["webhook-timestamp"] = str(timestamp)
    headers["webhook-signature"] = signatures(held, event.id, timestamp, body, now)
    return WebhookRequestBody(body, headers)


def _json(document: Mapping[str, Any]) -> bytes:
    return json.dumps(document, ensure_ascii=False).encode()


def line_of(event: PoolEvent) -> str:
    """One line of text for people; names of users are shortened, so that a message stays readable."""
    data = event.data
    name = str(data.get("name") or data.get("node_name") or "")[:100]
    match event.type.partition(".")[0]:
        case "task":
            what = f"{name} ({data['task']})"
            more = f": {data['reason']}" if data.get("reason") else ""
            if data.get("exit_code"):
                more += f", exit code {data['exit_code']}"
            return f"task {event.type.partition('.')[2]}: {what}{more}"
        case "batch":
            return f"batch done: {name} ({data['batch']}), {data['total']} tasks"
        case "budget":
            share = round(100 * data["spent_microcredits"] / data["cap_microcredits"])
            return f"budget of {data['month']}: {share} % spent"
        case "balance":
            return f"low balance: {data['balance_microcredits'] / 1e6:.2f} credits"
        case "node":
            return f"node {'lost contact' if event.type == EventKind.NODE_LOST else 'is back'}: {name} ({data['node']})"
        case "gpu":
            why = f": {data['why']}" if data.get("why") else ""
            return f"{event.type.replace('.', ' ')}: {data['gpu']} of {name}{why}"
        case "alert":
            return f"{event.type.replace('.', ' ')}: {data['alert']} ({data['severity']}): {data['summary']}"
        case _:
            return f"gpool {event.type}"


def asked_pause(retry_after: str, now: Instant) -> Span | None:
    """Pause of a `Retry-After` header: seconds, or a date."""
    text = retry_after.strip()
    if text.isascii() and text.isdigit() and len(text) < 10:
        return Span(int(text) * SECOND)
    try:
        at = parsedate_to_datetime(text)
    except ValueError:
        return None
    moment = at if at.tzinfo is not None else at.replace(tzinfo=UTC)
    return Span(
        max(0, round((moment - datetime.fromtimestamp(now / SECOND, UTC)).total_seconds()) * SECOND)
    )
