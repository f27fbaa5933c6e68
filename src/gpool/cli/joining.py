"""A node's identity: got once with an invite's token or the owner's key, kept in a file of its owner's, used ever after."""

from __future__ import annotations

import json
import platform
import re
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urlsplit

from gpool.client.config import write_private
from gpool.client.door import Door
from gpool.core.errors import Conflict, Invalid

_MOST_NAMESAKES = 100
_EXAMPLE = "gpool://HOST:PORT/join/TOKEN"


@dataclass(frozen=True, slots=True)
class Link:
    """A join link, taken apart."""

    url: str
    token: str = field(repr=False)


@dataclass(frozen=True, slots=True)
class Identity:
    """Who this node is to a server; its secret lies in a file beside it."""

    url: str
    id: str
    name: str
    secret_file: Path


def parse_link(text: str) -> Link:
    parts = urlsplit(text)
    found = re.fullmatch(r"/join/([A-Za-z0-9_\-.~]+)", parts.path)
    if parts.scheme != "gpool" or not parts.netloc or parts.username or found is None:
        raise Invalid(
            f"{text[:60]!r} is not a join link; one looks like {_EXAMPLE}. Make one with: gpool node invite"
        )
    return Link(f"http://{parts.netloc}", found.group(1))


def identity_file(folder: Path, url: str) -> Path:
    """One file a server, so that a machine can serve several."""
    place = re.sub(r"[^A-Za-z0-9.-]", "_", url.partition("://")[2])
    return folder / "nodes" / f"{place}.json"


def secret_file(file: Path) -> Path:
    return file.with_suffix(".secret")


def load_identity(file: Path) -> Identity | None:
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
        return Identity(found["url"], found["id"], found["name"], secret_file(file))
    except FileNotFoundError:
        return None
    except (ValueError, KeyError, TypeError, OSError) as exc:
        raise Invalid(
            f"{file} cannot be read ({exc}); remove it and join again with a new link"
        ) from exc


def enrol(door: Door, file: Path, *, name: str | None, token: str | None) -> Identity:
    """Ask the server for an identity and keep it; with a token, or by the key the door carries."""
    answer = _joined(door, name or platform.node() or "node", token, choose=name is None)
    write_private(secret_file(file), answer["secret"].encode())
    content = {"url": door.url, "id": answer["id"], "name": answer["name"]}
    write_private(file, json.dumps(content).encode())  # last: with it, the identity is whole
    return Identity(door.url, answer["id"], answer["name"], secret_file(file))


def _joined(door: Door, name: str, token: str | None, *, choose: bool) -> dict[str, str]:
    """The server's answer; a host name that is taken gets a number, a name the owner chose does not."""
    number = 1
    while True:
        wanted = {"name": name if number == 1 else f"{name}-{number}"}
        if token is not None:
            wanted["token"] = token
        try:
            answer: dict[str, str] = door.send_json("POST", "/v1/nodes", wanted)
        except Conflict:
            if not choose or number >= _MOST_NAMESAKES:
                raise
            number += 1
        else:
            return answer
