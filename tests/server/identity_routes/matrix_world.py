"""The pool that the matrix is asked about: people, teams, objects, and everybody's credentials.

Nothing an asker is allowed to do stays done: its write is carried out to the end and then rolled back, so that every
cell meets the same pool.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import httpx2
from pydantic import SecretStr

from gpool.core.errors import GpoolError
from gpool.core.ids import decode, encode
from gpool.server.actions.events.webhooks import new_destination
from gpool.server.events.delivery import place_of
from gpool.server.events.webhooks import DestinationSecrets, new_secret
from gpool.server.identity.audit import AuditEntry, AuditLink
from gpool.server.store.operations import deposits
from gpool.server.store.operations.events import destinations
from gpool.server.store.operations.identity import audit
from gpool.server.store.protocol import Operation, Store, again, operation
from tests.server.identity_routes.matrix import CONTENT, EVERYTHING, SHA256, USUAL, Asker, Row
from tests.server.identity_routes.people_desk import (
    PASSWORD,
    Somebody,
    bearer,
    joins,
    registered,
    signed,
    wallet,
)
from tests.server.server_desk import Desk, an_offer
from tests.tools.ledger_charges import charged, earned
from tests.tools.nodes import a_key

T = TypeVar("T")
NONE = "0" * 13
ALWAYS = {"first": "2001-01-01T00:00:00Z", "last": "2999-01-01T00:00:00Z"}
SOURCE = deposits.DepositSource(1, "0x" + "11" * 20, "0x" + "22" * 20)
DEPOSITS = {
    "deposit_rpc_url": SecretStr("http://127.0.0.1:9"),
    "deposit_token": SOURCE.token,
    "deposit_address": SOURCE.address,
    "deposit_from_block": 5,
}
TEAM_INPUT = b"the team's input"


class _Done(Exception):
    """Its value is what it would have given. No refusal of ours, so the store rolls everything back."""

    def __init__(self, value: object, audited: tuple[AuditLink, ...]) -> None:
        super().__init__("rolled back")
        self.value, self.audited = value, audited


class Rehearsing:
    """A store whose writes come to their end and are rolled back."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self.ended = 0
        self.audited: list[AuditEntry] = []  # in the transactions that ended

    async def write(self, op: Operation[T]) -> T:
        try:
            await self._store.write(_rehearsed(op))
        except _Done as done:
            if not _is_refused(done.value):
                self.ended += 1
                self.audited += [link.entry for link in done.audited]
            return done.value  # type: ignore[return-value]
        raise AssertionError("a rehearsal always ends with an error")

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)


def _is_refused(value: object) -> bool:
    """Submissions of one transaction are answered one by one, a refused one with its error."""
    outcomes = getattr(value, "outcomes", None)
    return bool(outcomes) and all(isinstance(each, GpoolError) for each in outcomes)


@operation
def _rehearsed(op: Operation[T]) -> Operation[T]:
    head = yield from audit.head()
    value = yield from again(op)
    raise _Done(value, (yield from audit.entries(head.sequence if head else 0, 100)))


@dataclass
class Pool:
    desk: Desk
    store: Rehearsing
    askers: dict[str, tuple[Asker, dict[str, str]]] = field(default_factory=dict)
    ids: dict[str, str] = field(default_factory=dict)  # of objects, by the matrix's names
    machines: dict[str, httpx2.AsyncClient] = field(default_factory=dict)  # each proves itself

    def parts(self, thing: str) -> dict[str, str]:
        """The object's id under every name a path has for it."""
        found = self.ids.get(thing, "")
        first, _, second = found.partition(" ")
        return {
            "id": first,
            "gpu": first,
            "sha256": first or SHA256,
            "address": first,
            "user": second,
            "name": "none",
            "code": "none",
        }

    async def ask(self, asker: str, route: tuple[str, str], row: Row, thing: str) -> int | str:
        """The status, or OK for whatever was allowed to go on."""
        parts = self.parts(thing)
        method, path = route
        url = (path + row.query).format(**parts)
        body = row.body(parts) if callable(row.body) else row.body
        content = {"content": body} if isinstance(body, bytes) else {"json": body}
        before = self.store.ended
        answer = await self.machines.get(asker, self.desk.bare).request(
            method, url, headers=self.askers[asker][1], **(content if body is not None else {})
        )
        if row.open is not None:
            return answer.status_code
        if self.store.ended > before:
            return "ok"  # it was done, and undone
        if answer.status_code in (401, 403, 404):
            return answer.status_code
        assert answer.status_code < 500, answer.text
        return "ok"


async def a_pool(desk: Desk) -> Pool:
    """Everything is there and everybody signed in; from then on nothing stays written."""
    pool = Pool(desk, Rehearsing(desk.server.store))
    people = {
        name: await registered(desk, name)
        for name in ("ada", "stranger", "weak", "tess", "mel", "mem", "vic", "exa")
    }
    for name in ("disabled", "signed-out"):
        people[name] = await registered(desk, name)
    await _objects(pool, people)
    await _askers(pool, people)
    settings = desk.server.settings.model_copy(update=DEPOSITS)
    await desk.server.write(deposits.open_cursor(SOURCE, 9, desk.server.now))
    server = replace(desk.server, store=pool.store, settings=settings)  # type: ignore[arg-type]
    server.credentials._store = pool.store
    desk.app.state.server = server
    return pool


async def _objects(pool: Pool, people: dict[str, Somebody]) -> None:
    ada, tess, mel, exa = (people[name] for name in ("ada", "tess", "mel", "exa"))
    ids = pool.ids
    team = await _id(tess, "/v1/teams", {"name": "lab"})
    ids["team:t"] = team
    for name, role in (("mel", "member"), ("mem", "member"), ("vic", "viewer"), ("exa", "member")):
        await joins(tess, team, people[name], role)
    ids["member:t"] = f"{team} {people['vic'].id}"
    sha256 = hashlib.sha256(TEAM_INPUT).hexdigest()
    await mel.desk.bare.put(f"/v1/artifacts/{sha256}", content=TEAM_INPUT, headers=mel.headers)
    ids["artifact:t"] = sha256
    one = {"path": "in", "sha256": sha256, "size_bytes": len(TEAM_INPUT)}
    ids["task:p"], ids["batch:p"] = await _task(ada, more=True)
    ids["task:t"], ids["batch:t"] = await _task(mel, team=team, inputs=[one])
    ids["task:o"], ids["batch:o"] = await _task(exa, team=team)
    assert (await exa.ask("DELETE", f"/v1/teams/{team}/members/{exa.id}")).status_code == 204
    again = await tess.ask("POST", f"/v1/teams/{team}/members", {"user": "exa"})
    assert again.status_code == 202
    ids["invited:t"], ids["invitation:t"] = f"{team} exa", team
    await ada.desk.bare.put(f"/v1/artifacts/{SHA256}", content=CONTENT, headers=ada.headers)
    ids["artifact:p"] = SHA256
    done, ids["batch:done"] = await _task(ada)
    await ada.ask("DELETE", f"/v1/tasks/{done}")
    gpu = {"index": 0, "uuid": "GPU-of-ada", "model": "H100", "memory_bytes": 80 << 30}
    desk, offer = pool.desk, an_offer()
    lends = {"name": "ada's", "cpu_milli": 2000, "gpus": [gpu]}
    machine = await desk.join(a_key(1), offer, ada.headers, **lends)
    other = await desk.join(a_key(2), offer, people["stranger"].headers, name="x")
    ids["node:p"] = machine.badge.identity.node
    ids["cordon:p"] = other.badge.identity.node
    assert (await desk.http.put(f"/v1/admin/cordons/{ids['cordon:p']}")).status_code == 200
    kept = {"nodes": [ids["cordon:p"]], "users": [ada.id], **ALWAYS}
    made = await desk.post("/v1/admin/reservations", kept)
    ids["reservation:p"] = made.json()["id"]
    pool.machines = {"machine": desk.http_of(machine), "other machine": desk.http_of(other)}
    listed = (await ada.ask("GET", "/v1/resources")).json()["items"]
    ids["gpu:p"] = next(each["id"] for each in listed if each["kind"] == "gpu")
    ids["key:p"] = await _id(ada, "/v1/keys", {"name": "an old one"})
    ids["session:p"] = (await ada.ask("GET", "/v1/sessions")).json()["items"][0]["id"]
    ids["user:p"] = ada.id
    ids["webhook:p"] = encode("webhook", await _destination(desk, ("user", ada.user)))
    ids["webhook:t"] = encode("webhook", await _destination(desk, ("team", decode("team", team))))
    ids["notice:p"] = encode("notice", await _destination(desk, ("user", ada.user), "mail"))
    for owner, query in ((ada, ""), (tess, f"?team={team}")):
        kept = await owner.ask("PUT", f"/v1/secrets/none{query}", {"value": "hush"})
        assert kept.status_code == 200, kept.text
    ids["secret:p"] = ""
    ids["charge:p"] = await charged(desk.server, ada.id, 100)
    ids["receipt:p"] = await earned(desk.server, ada.id, ids["node:p"])
    ids |= {"payout:p": "1", "earned:p": "", "used:p": ""}
    linking = {**await signed(pool.desk, wallet(7), "link", "ada"), "password": PASSWORD}
    assert (await ada.ask("POST", "/v1/wallets", linking)).status_code == 201
    ids["wallet:p"] = wallet(7).address
    ids |= {
        "team:-": f"tm-{NONE}",
        "member:-": f"tm-{NONE} {people['vic'].id}",
        "invited:-": f"tm-{NONE} exa",
        "invitation:-": f"tm-{NONE}",
        "task:-": f"t-{NONE}",
        "batch:-": f"b-{NONE}",
        "node:-": f"n-{NONE}",
        "cordon:-": f"n-{NONE}",
        "reservation:-": f"rs-{NONE}",
        "gpu:-": f"g-{NONE}",
        "key:-": f"k-{NONE}",
        "webhook:-": f"wh-{NONE}",
        "notice:-": f"nt-{NONE}",
        "session:-": "0" * 26,
        "user:-": f"u-{NONE}",
        "wallet:-": wallet(8).address,
        "receipt:-": f"rc-{NONE}",
        "artifact:-": "f" * 64,
    }


async def _askers(pool: Pool, people: dict[str, Somebody]) -> None:
    personal = ["task", "batch", "node", "gpu", "key", "session", "user", "wallet", "artifact"]
    personal += ["receipt", "webhook", "notice", "secret"]
    own = {f"{kind}:p": frozenset({"self"}) for kind in personal}
    own["batch:done"] = frozenset({"self"})
    of_team = ["task", "batch", "artifact", "team", "member", "invited", "webhook"]

    def in_team(*words: str, orphans: str) -> dict[str, frozenset[str]]:
        stands = {f"{kind}:t": frozenset(words) for kind in of_team}
        return stands | {f"{kind}:o": frozenset({orphans}) for kind in ("task", "batch")}

    stands: dict[str, dict[str, frozenset[str]]] = {
        "ada": own,
        "tess": in_team("owner", orphans="owner"),
        "mel": in_team("member", "self", orphans="member"),
        "mem": in_team("member", orphans="member"),
        "vic": in_team("viewer", orphans="viewer") | {"member:t": frozenset({"viewer", "leaver"})},
        "exa": {"invitation:t": frozenset({"invited"})},
    }
    # `self` of a team's member is about what they made, not about the team
    for kind in ("team:t", "member:t", "invited:t", "webhook:t"):
        stands["mel"][kind] = frozenset({"member"})
    desk, ada, mel = pool.desk, people["ada"], people["mel"]
    for name in ("ada", "stranger", "weak", "tess", "mel", "mem", "vic", "exa"):
        granted = frozenset() if name == "weak" else EVERYTHING
        asker = Asker(name, permissions=granted, stands=stands.get(name, {}))
        pool.askers[name] = (asker, people[name].headers)

    async def key(of: Somebody, **members: Any) -> dict[str, str]:
        made = await of.ask("POST", "/v1/keys", {"name": "k", **members})
        assert made.status_code == 201, made.text
        return bearer(made.json()["key"])

    add = pool.askers.__setitem__
    add("ada's key", (Asker("ada's key", scopes=USUAL, stands=own), await key(ada)))
    reader = frozenset({"tasks:read"})
    add(
        "ada's reader",
        (Asker("ada's reader", scopes=reader, stands=own), await key(ada, scopes=["tasks:read"])),
    )
    add(
        "mel's key for the team",
        (
            Asker("mel's", scopes=USUAL, stands=stands["mel"], only_team=True),
            await key(mel, team=pool.ids["team:t"]),
        ),
    )
    all_three = EVERYTHING | {"operator"}
    add("operator", (Asker("operator", permissions=all_three, is_operator=True), bearer(desk.key)))
    admin = await desk.post("/v1/keys", {"name": "admin", "scopes": ["admin"]})
    add(
        "operator's key",
        (
            Asker(
                "operator's key",
                permissions=all_three,
                scopes=frozenset({"admin"}),
                is_operator=True,
            ),
            bearer(admin.json()["key"]),
        ),
    )
    for name in ("machine", "other machine"):
        add(name, (Asker(name, "machine"), {}))
    ended = await ada.ask("POST", "/v1/keys", {"name": "ended"})
    await ada.ask("DELETE", f"/v1/keys/{ended.json()['id']}")
    expiring = await key(ada, expires_in_s=60)
    await desk.http.patch(f"/v1/users/{people['disabled'].id}", json={"disabled": True})
    await desk.http.patch(f"/v1/users/{people['weak'].id}", json={"permissions": []})
    await people["signed-out"].ask("POST", "/v1/auth/logout")
    desk.clock.advance(61)
    unknown: dict[str, dict[str, str]] = {
        "nobody": {},
        "a made-up key": bearer("gpk_" + "x" * 43),
        "an ended key": bearer(ended.json()["key"]),
        "an expired key": expiring,
        "somebody disabled": people["disabled"].headers,
        "somebody signed out": people["signed-out"].headers,
    }
    for name, headers in unknown.items():
        add(name, (Asker(name, "unknown"), headers))


async def _destination(desk: Desk, holder: tuple[str, int], form: str = "standard") -> int:
    """A webhook or mail address that was once allowed; deliveries to it are refused before anything is dialled."""
    server, id_ = desk.server, desk.server.ids.next()
    held = DestinationSecrets("http://127.0.0.1:9/", new_secret())
    sealed = await server.sealer.seal(place_of(id_), held.encoded())
    status = "unconfirmed" if form == "mail" else "on"
    row = new_destination(id_, holder, form, "*", sealed, status, server.now, "a hash")
    await server.store.write(destinations.add_destination(row))
    return id_


async def _id(who: Somebody, path: str, document: Any) -> str:
    made = await who.ask("POST", path, document)
    assert made.status_code == 201, made.text
    found: str = made.json()["id"]
    return found


async def _task(who: Somebody, **members: Any) -> tuple[str, str]:
    answer = await who.ask("POST", "/v1/tasks", {"command": ["true"], **members})
    assert answer.status_code == 202, answer.text
    return answer.json()["ids"][0], answer.json()["batch"]
