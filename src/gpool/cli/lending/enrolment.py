"""A node's identity: its own key, and a name got once with an invite's token or the owner's key; used ever after."""

from __future__ import annotations

import json
import platform
import re
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urlsplit

from gpool.client.connection.config import write_private
from gpool.client.connection.transport import Door
from gpool.core.errors import Conflict, Invalid, Unreachable
from gpool.transfer.node_proofs import ChallengeStatement, NodeKey, Purpose, public_text
from gpool.transfer.pinning import parse_fingerprint
from gpool.transfer.requests import Address, is_loopback

_MOST_NAMESAKES = 100
_EXAMPLE = "gpool://HOST:PORT/join/TOKEN#sha256=FINGERPRINT"


@dataclass(frozen=True, slots=True)
class Link:
    """A join link, taken apart."""

    address: Address
    token: str = field(repr=False)


@dataclass(frozen=True, slots=True)
class Identity:
    """Who this node is to a server, and how it knows that server; its key lies in a file beside it."""

    address: Address
    id: str
    name: str
    server: str  # the name this server goes by in proofs
    key_file: Path


def parse_link(text: str, *, plain: bool = False) -> Link:
    """A link says how its server is known: by a fingerprint, by `#tls` or (off loopback) by an authority.

    Unencrypted it is joined on this machine only, or (`plain`) at its owner's word; never because a link says so.
    """
    parts = urlsplit(text)
    found = re.fullmatch(r"/join/([A-Za-z0-9_\-.~]+)", parts.path)
    if parts.scheme != "gpool" or not parts.hostname or parts.username or found is None:
        raise Invalid(
            f"{text[:60]!r} is not a join link; one looks like {_EXAMPLE}. Make one with: gpool node invite"
        )
    if parts.fragment not in ("", "tls"):
        fingerprint = parse_fingerprint(parts.fragment)
        return Link(Address(f"https://{parts.netloc}", fingerprint), found.group(1))
    open_ = not parts.fragment and (plain or is_loopback(parts.hostname))
    scheme = "http" if open_ else "https"
    return Link(Address(f"{scheme}://{parts.netloc}", plain=plain), found.group(1))


def identity_file(folder: Path, url: str) -> Path:
    """One file a server, so that a machine can serve several."""
    place = re.sub(r"[^A-Za-z0-9.-]", "_", url.partition("://")[2])
    return folder / "nodes" / f"{place}.json"


def key_file(file: Path) -> Path:
    return file.with_suffix(".key")


def load_identity(file: Path) -> Identity | None:
    """None: it has not joined; nor has one that joined before nodes had keys."""
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
        if "server" not in found:
            return None
        address = Address(found["url"], found.get("fingerprint"), bool(found.get("plain")))
        return Identity(address, found["id"], found["name"], found["server"], key_file(file))
    except FileNotFoundError:
        return None
    except (ValueError, KeyError, TypeError, OSError) as exc:
        raise Invalid(
            f"{file} cannot be read ({exc}); remove it and join again with a new link"
        ) from exc


def enrol(door: Door, file: Path, *, name: str | None, token: str | None) -> Identity:
    """Make a key and a name with the server, and keep both; with a token, or by the key the door carries."""
    key = NodeKey.from_file(key_file(file))
    answer = _joined(door, key, name or platform.node() or "node", token, choose=name is None)
    address = door.address
    content = {
        "url": address.url,
        "fingerprint": address.fingerprint,
        "plain": address.plain,
        "id": answer["id"],
        "name": answer["name"],
        "server": answer["server"],
    }
    write_private(file, json.dumps(content).encode())  # last: with it, the identity is whole
    return Identity(address, answer["id"], answer["name"], answer["server"], key_file(file))


def _joined(
    door: Door, key: NodeKey, name: str, token: str | None, *, choose: bool
) -> dict[str, str]:
    """The server's answer; a host name that is taken gets a number, a name the owner chose does not."""
    number = 1
    while True:
        wanted: dict[str, object] = {"name": name if number == 1 else f"{name}-{number}"}
        if token is not None:
            wanted["token"] = token
        try:
            return _proving(door, key, wanted)
        except Conflict:
            if not choose or number >= _MOST_NAMESAKES:
                raise
            number += 1


def _proving(door: Door, key: NodeKey, wanted: dict[str, object]) -> dict[str, str]:
    """Each try with a challenge of its own: a proof is good once. The server knows us again by our key."""
    pauses = None
    while True:
        challenge = door.send_json("POST", "/v1/nodes/challenges", {})
        statement = ChallengeStatement(
            Purpose.JOIN, challenge["server"], "", key.public, challenge["nonce"]
        )
        proof = {"nonce": challenge["nonce"], "signature": key.sign(statement)}
        asked = {**wanted, "public_key": public_text(key.public), "proof": proof}
        try:
            answer: dict[str, str] = door.send_json_once("POST", "/v1/nodes", asked)
        except Unreachable:
            pauses = door.pauses() if pauses is None else pauses
            pause = next(pauses, None)
            if pause is None or door.wait(pause):
                raise
        else:
            return answer
