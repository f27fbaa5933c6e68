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
from gpool.core.errors import Invalid

_EXAMPLE = "gpool://HOST:PORT/join/TOKEN"


@dataclass(frozen=True, slots=True)
class Link:
    """A join link, taken apart."""

    url: str
    token: str = field(repr=False)


@dataclass(frozen=True, slots=True)
class Identity:
    """Who this node is to a server."""

    url: str
    id: str
    name: str
    secret: str = field(repr=False)


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


def load_identity(file: Path) -> Identity | None:
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
        return Identity(found["url"], found["id"], found["name"], found["secret"])
    except FileNotFoundError:
        return None
    except (ValueError, KeyError, TypeError, OSError) as exc:
        raise Invalid(
            f"{file} cannot be read ({exc}); remove it and join again with a new link"
        ) from exc


def enrol(door: Door, file: Path, *, name: str | None, token: str | None) -> Identity:
    """Ask the server for an identity and keep it; with a token, or by the key the door carries."""
    wanted = {"name": name or platform.node() or "node"}
    if token is not None:
        wanted["token"] = token
    answer = door.send_json("POST", "/v1/nodes", wanted)
    identity = Identity(door.url, answer["id"], answer["name"], answer["secret"])
    content = {
        "url": identity.url,
        "id": identity.id,
        "name": identity.name,
        "secret": identity.secret,
    }
    write_private(file, json.dumps(content).encode())
    return identity


def agent_variables(
    file: Path, identity: Identity, *, home: Path, slots: int | None, simulate: str | None
) -> dict[str, str]:
    """How the agent is told what to do: variables, because a command line is for everyone to read."""
    found = {
        "GPOOL_AGENT_URL": identity.url,
        "GPOOL_AGENT_NODE": identity.id,
        "GPOOL_AGENT_IDENTITY": str(file),
        "GPOOL_AGENT_HOME": str(home),
    }
    if slots is not None:
        found["GPOOL_AGENT_SLOTS"] = str(slots)
    if simulate:
        found["GPOOL_AGENT_SIMULATE_GPUS"] = simulate
    return found
