"""`gpool join LINK`: enrol this machine, run its agent; the lending options of `up` and `join`. The home directory
identifies the node.
"""

from __future__ import annotations

import json
import platform
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urlsplit

import click

from gpool.cli.command import SectionedCommand, examples, require_extra
from gpool.cli.lending.children import AGENT_MODULE, exec_module
from gpool.cli.lending.log_options import announce, log_format_option
from gpool.cli.lending.terms import LendingTerms, lending
from gpool.client.config import data_home, home, write_config
from gpool.client.transport import ApiTransport
from gpool.core.errors import AlreadyJoined, Conflict, Forbidden, Invalid, Unreachable
from gpool.transfer.keys import parse_fingerprint
from gpool.transfer.node_proofs import ChallengeStatement, NodeKey, Purpose, public_text
from gpool.transfer.requests import Address, is_loopback, origin_of

_MOST_NAMESAKES = 100
_EXAMPLE = "gpool://HOST:PORT/join/TOKEN/POOL#sha256=FINGERPRINT"


@dataclass(frozen=True, slots=True)
class JoinLink:
    address: Address
    token: str = field(repr=False)
    server: str = ""  # name of the pool in proofs; "": a link of an older server


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
    Plain HTTP is used on loopback or with `plain` only, never because of a link. The last part of the path is the
    pool's name, which the node's proofs are signed for.
    """
    parts = urlsplit(text)
    found = re.fullmatch(r"/join/([A-Za-z0-9_\-.~]+)(?:/(pool-[A-Za-z0-9]{1,64}))?", parts.path)
    if parts.scheme != "gpool" or not parts.hostname or parts.username or found is None:
        raise Invalid(
            f"{text[:60]!r} is not a join link; expected {_EXAMPLE}. Create one with: gpool node invite"
        )
    token, server = found.group(1), found.group(2) or ""
    if parts.fragment not in ("", "tls"):
        fingerprint = parse_fingerprint(parts.fragment)
        return JoinLink(Address(f"https://{parts.netloc}", fingerprint), token, server)
    open_ = not parts.fragment and (plain or is_loopback(parts.hostname))
    scheme = "http" if open_ else "https"
    return JoinLink(Address(f"{scheme}://{parts.netloc}", plain=plain), token, server)


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


def joined_files(folder: Path) -> list[Path]:
    """Files of the pools that this machine has joined, by name."""
    return sorted((folder / "nodes").glob("*.json"))


def agent_folder(file: Path) -> Path:
    """The agent's data directory: environments, artifacts, guests' disks. An old one beside `file` stays in use."""
    before = file.with_suffix("")
    return before if before.is_dir() else data_home() / "nodes" / before.name


def saved_identity(folder: Path, pool: str | None) -> tuple[Path, EnrolledNode]:
    """Identity of an earlier `gpool join`; `pool`: its URL, needed if this machine joined several.

    `Invalid` lists the pools if none or several match.
    """
    found = [(file, one) for file in joined_files(folder) if (one := load_identity(file))]
    url = None if pool is None else pool.rstrip("/")
    matching = [(file, one) for file, one in found if url in (None, one.address.url)]
    if len(matching) == 1:
        return matching[0]
    there = ", ".join(one.address.url for _, one in found)
    if not found:
        raise Invalid(
            f"this machine has joined no pool; run gpool join LINK ({_EXAMPLE}). Create a link with: gpool node invite"
        )
    raise Invalid(f"this machine has joined {there}; name one: gpool join URL")


def enrol(
    api: ApiTransport, file: Path, *, name: str | None, link: JoinLink | None = None
) -> EnrolledNode:
    """Authorised by the link's token, or by the API key of `api`.

    Proofs are signed for the pool that the link names; `Forbidden` if the server claims to be another. Without a
    link, `api` is authorised by its key to the server that `gpool up` has just started, and that one says its name.
    """
    if link is not None and not link.server:
        raise Invalid(
            f"the join link for {link.address.url} names no pool (/pool-… after the token): it is cut off, or of an "
            "older server. Create a new one with: gpool node invite"
        )
    key = NodeKey.from_file(key_file(file))
    answer = _joined(api, key, name or platform.node() or "node", link, choose=name is None)
    address = api.address
    content = {
        "url": address.url,
        "fingerprint": address.fingerprint,
        "plain": address.plain,
        "id": answer["id"],
        "name": answer["name"],
        "server": answer["server"],
    }
    write_config(
        file, json.dumps(content).encode()
    )  # last: its presence means that enrolment is complete
    return EnrolledNode(address, answer["id"], answer["name"], answer["server"], key_file(file))


def _joined(
    api: ApiTransport, key: NodeKey, name: str, link: JoinLink | None, *, choose: bool
) -> dict[str, str]:
    """A host name in use gets a number; with `choose` false it raises `Conflict`."""
    number = 1
    while True:
        wanted: dict[str, object] = {"name": name if number == 1 else f"{name}-{number}"}
        if link is not None:
            wanted["token"] = link.token
        try:
            return _proving(api, key, wanted, None if link is None else link.server)
        except AlreadyJoined:
            raise
        except Conflict:
            if not choose or number >= _MOST_NAMESAKES:
                raise
            number += 1


def _proving(
    api: ApiTransport, key: NodeKey, wanted: dict[str, object], server: str | None
) -> dict[str, str]:
    """New challenge per attempt: a proof is valid once. Retries are idempotent by the node's key."""
    pauses = None
    while True:
        challenge = api.send_json("POST", "/v1/nodes/challenges", {})
        pool = challenge["server"] if server is None else server
        if challenge["server"] != pool:
            raise _another_pool(api.url, pool, challenge["server"])
        statement = ChallengeStatement(Purpose.JOIN, pool, "", key.public, challenge["nonce"])
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
            if answer["server"] != pool:
                raise _another_pool(api.url, pool, answer["server"])
            return answer


def _another_pool(url: str, linked: str, found: str) -> Forbidden:
    return Forbidden(
        f"the link is for {linked}, and {url} says that it is {found[:80]!r}; nothing was joined. "
        "Ask the pool's operator for a new link"
    )


def agent_variables(
    identity: EnrolledNode, data: Path, terms: LendingTerms, servers: Sequence[str] = ()
) -> dict[str, str]:
    """Environment of the agent; not arguments, which process lists show. `servers`: further addresses of the pool."""
    named = {
        "SERVER_URL": ",".join((identity.address.url, *servers)),
        "PLAIN_HTTP": str(int(identity.address.plain)),
        "FINGERPRINT": identity.address.fingerprint,
        "NODE": identity.id,
        "SERVER_NAME": identity.server,
        "KEY_FILE": str(identity.key_file),
        "DATA_DIR": str(data),
        "ALLOW_PROCESS": str(int(terms.allow_process)),
        "SLOTS": None if terms.slots is None else str(terms.slots),
        "SIMULATE_GPUS": terms.simulate_gpus,
        "POLICY": terms.policy and str(terms.policy.absolute()),
        "LABELS": ",".join(terms.labels),
        "PRICE": terms.price,
        "MIN_CHARGE": terms.min_charge,
        "NOTICE": terms.notice,
        "SITE": terms.site,
        "GANG_ADDRESS": terms.address,
        "GANG_PORT": terms.gang_port and str(terms.gang_port),
        "GANG_TRUSTED_LINK": "1" if terms.trusted_link else None,
    }
    given = {f"GPOOL_AGENT_{name}": value for name, value in named.items() if value}
    if terms.free_for is not None:  # empty: nobody, whatever the policy says
        given["GPOOL_AGENT_FREE_FOR"] = terms.free_for
    return given


def _addresses(_: click.Context, __: click.Parameter, value: tuple[str, ...]) -> tuple[str, ...]:
    try:
        return tuple(origin_of(url) for url in value)
    except Invalid as error:
        raise click.BadParameter(error.detail) from error


@click.command(
    cls=SectionedCommand,
    epilog=examples(
        "gpool join gpool://pool.example:8642/join/TOKEN/POOL#sha256=FINGERPRINT",
        "gpool join LINK --policy rules.toml --label ssd --price 0.31/h",
        "gpool join LINK --server https://b.pool.example:8642 --server https://c.pool.example:8642",
        "gpool join",
    ),
)
@click.argument("link", required=False, metavar="[LINK|URL]")
@log_format_option
@click.option("--name", metavar="NAME", help="Name of the node (default: the host name).")
@click.option(
    "--plain-http",
    is_flag=True,
    envvar="GPOOL_PLAIN_HTTP",
    help="Join without encryption; the network can read and change everything.",
)
@click.option(
    "--server",
    "servers",
    multiple=True,
    callback=_addresses,
    metavar="URL",
    help="Another server of this pool (replica), used when the link's is away (repeatable).",
)
@lending
def join(
    link: str | None,
    name: str | None,
    plain_http: bool,
    servers: Sequence[str],
    terms: LendingTerms,
) -> None:
    """Join this machine to a pool and run its agent.

    Without a link it runs the agent of the pool joined before; with several, name one by its URL.
    """
    require_extra("agent", "gpool join")
    if link is None or re.fullmatch(r"https?://[^/]+/?", link):
        _run_again(*saved_identity(home(), link), terms, servers)
        return
    wanted = parse_link(link, plain=plain_http)
    url = wanted.address.url
    file = identity_file(home(), url)
    known = load_identity(file)
    if known is not None:
        require_same_certificate(known.address, wanted.address, file)
    elif file.exists():
        announce("This machine joined with a version without node keys; joining again.")
    api = ApiTransport(wanted.address, "")
    try:
        identity = rejoin(api, file, known, name=name, link=wanted)
    finally:
        api.close()
    announce("The agent runs until Ctrl-C.")
    exec_module(AGENT_MODULE, agent_variables(identity, agent_folder(file), terms, servers))


def _run_again(
    file: Path, identity: EnrolledNode, terms: LendingTerms, servers: Sequence[str]
) -> None:
    about = f"Node {identity.name} ({identity.id}) of {identity.address.url}."
    announce(f"{about} The agent runs until Ctrl-C.")
    exec_module(AGENT_MODULE, agent_variables(identity, agent_folder(file), terms, servers))


def rejoin(
    api: ApiTransport, file: Path, known: EnrolledNode | None, *, name: str | None, link: JoinLink
) -> EnrolledNode:
    """Use the link unless this machine is a node already (`known`); print the result.

    A node that was removed joins again as a new one, with the same key.
    """
    url = api.address.url
    try:
        made = enrol(api, file, name=name, link=link)
    except AlreadyJoined as error:
        if known is None:
            raise
        announce(f"{url}: {error.detail}. The link was not used.")
        return known
    except Unreachable as error:
        if known is None:
            raise Unreachable(
                f"{error.detail.partition('; ')[0]}. The link names this address: check that this machine reaches it "
                "(routes, firewall). If it is not the pool's address, the operator sets another one with: "
                "gpool up --public-url URL"
            ) from error
        announce(f"{error.detail}. Starting as {known.name} ({known.id}).")
        return known
    if known is not None and known.id == made.id:
        announce(f"Already a node of {url}: {made.name} ({made.id}).")
    else:
        again = "" if known is None else f"; the earlier node {known.name} ({known.id}) was removed"
        announce(f"Joined {url} as {made.name} ({made.id}){again}.")
    return made


def require_same_certificate(known: Address, linked: Address, file: Path) -> None:
    """`Forbidden` if the link names another certificate than the saved one."""
    if known.fingerprint != linked.fingerprint:
        raise Forbidden(
            f"the link has another certificate fingerprint for {linked.url} than the one saved here. "
            f"If the pool's operator changed it, remove {file} and join again"
        )
