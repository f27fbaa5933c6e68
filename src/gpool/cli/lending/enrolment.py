"""Enrolment of a node: create its key, register it, keep its identity."""

from __future__ import annotations

import json
import platform
import re
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urlsplit

from gpool.client.connection.config import write_private
from gpool.client.connection.transport import ApiTransport
from gpool.core.errors import Conflict, Invalid, Unreachable
from gpool.transfer.node_proofs import ChallengeStatement, NodeKey, Purpose, public_text
from gpool.transfer.pinning import parse_fingerprint
from gpool.transfer.requests import Address, is_loopback

_MOST_NAMESAKES = 100
_EXAMPLE = "gpool://HOST:PORT/join/TOKEN#sha256=FINGERPRINT"


@dataclass(frozen=True, slots=True)
class JoinLink:
    address: Address
    token: str = field(repr=False)


@dataclass(frozen=True, slots=True)
class EnrolledNode:
    """The private key is in `key_file`."""

    address: Address
    id: str
    name: str
    server: str  # name of the server in proofs
    key_file: Path


def parse_link(text: str, *, plain: bool = False) -> JoinLink:
    """Parse a join link; `Invalid` if it is malformed.

    Its fragment is the fingerprint of the server's certificate; `#tls`, or none for a remote host: signed by an authority.
    Plain HTTP is used on loopback or with `plain` only, never because of a link.
    """
    parts = urlsplit(text)
    found = re.fullmatch(r"/join/([A-Za-z0-9_\-.~]+)", parts.path)
    if parts.scheme != "gpool" or not parts.hostname or parts.username or found is None:
        raise Invalid(
            f"{text[:60]!r} is not a join link; expected {_EXAMPLE}. Create one with: gpool node invite"
        )
    if parts.fragment not in ("", "tls"):
        fingerprint = parse_fingerprint(parts.fragment)
        return JoinLink(Address(f"https://{parts.netloc}", fingerprint), found.group(1))
    open_ = not parts.fragment and (plain or is_loopback(parts.hostname))
    scheme = "http" if open_ else "https"
    return JoinLink(Address(f"{scheme}://{parts.netloc}", plain=plain), found.group(1))


def identity_file(folder: Path, url: str) -> Path:
    """One file per server: a machine can join several pools."""
    place = re.sub(r"[^A-Za-z0-9.-]", "_", url.partition("://")[2])
    return folder / "nodes" / f"{place}.json"


def key_file(file: Path) -> Path:
    return file.with_suffix(".key")


def load_identity(file: Path) -> EnrolledNode | None:
    """None if this machine has not joined, or joined with a version without node keys."""
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
        if "server" not in found:
            return None
        address = Address(found["url"], found.get("fingerprint"), bool(found.get("plain")))
        return EnrolledNode(address, found["id"], found["name"], found["server"], key_file(file))
    except FileNotFoundError:
        return None
    except (ValueError, KeyError, TypeError, OSError) as exc:
        raise Invalid(
            f"{file} cannot be read ({exc}); remove it and join again with a new link"
        ) from exc


def enrol(api: ApiTransport, file: Path, *, name: str | None, token: str | None) -> EnrolledNode:
    """Authorised by the token, or by the API key of `api`."""
    key = NodeKey.from_file(key_file(file))
    answer = _joined(api, key, name or platform.node() or "node", token, choose=name is None)
    address = api.address
    content = {
        "url": address.url,
        "fingerprint": address.fingerprint,
        "plain": address.plain,
        "id": answer["id"],
        "name": answer["name"],
        "server": answer["server"],
    }
    write_private(
        file, json.dumps(content).encode()
    )  # last: its presence means that enrolment is complete
    return EnrolledNode(address, answer["id"], answer["name"], answer["server"], key_file(file))


def _joined(
    api: ApiTransport, key: NodeKey, name: str, token: str | None, *, choose: bool
) -> dict[str, str]:
    """A host name in use gets a number; with `choose` false it raises `Conflict`."""
    number = 1
    while True:
        wanted: dict[str, object] = {"name": name if number == 1 else f"{name}-{number}"}
        if token is not None:
            wanted["token"] = token
        try:
            return _proving(api, key, wanted)
        except Conflict:
            if not choose or number >= _MOST_NAMESAKES:
                raise
            number += 1


def _proving(api: ApiTransport, key: NodeKey, wanted: dict[str, object]) -> dict[str, str]:
    """New challenge per attempt: a proof is valid once. Retries are idempotent by the node's key."""
    pauses = None
    while True:
        challenge = api.send_json("POST", "/v1/nodes/challenges", {})
        statement = ChallengeStatement(
            Purpose.JOIN, challenge["server"], "", key.public, challenge["nonce"]
        )
        proof = {"nonce": challenge["nonce"], "signature": key.sign(statement)}
        request = {**wanted, "public_key": public_text(key.public), "proof": proof}
        try:
            answer: dict[str, str] = api.send_json_once("POST", "/v1/nodes", request)
        except Unreachable:
            pauses = api.pauses() if pauses is None else pauses
            pause = next(pauses, None)
            if pause is None or api.wait(pause):
                raise
        else:
            return answer
