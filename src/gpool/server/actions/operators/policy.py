"""What operators do to the pool while it runs: another policy (tried first, if they like), cordons and draining, reservations.

Stored and audited in one transaction, then laid upon the scheduler; other replicas take it up with their next look. Who may
is decided before.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from gpool.core.errors import Invalid, NotFound
from gpool.core.ids import NodeId, TaskId, UserId, encode
from gpool.core.model import Audience, Instant
from gpool.core.permissions import TeamId
from gpool.core.scheduler.order.limits import Holder
from gpool.core.scheduler.order.orders import Policy
from gpool.core.scheduler.place.portfolio import Learnt
from gpool.core.scheduler.predict.dry_run import DryRun, compare
from gpool.core.scheduler.state.operator_rules import OperatorRules, PolicyChange, Reservation
from gpool.server.actions.operators.audit import audited, entry
from gpool.server.actions.tasks.preempt import make_room
from gpool.server.scheduling.delivery import lines_on
from gpool.server.server import Once, Server
from gpool.server.store.identity_values import Caller
from gpool.server.store.operation import operation
from gpool.server.store.operations.identity import accounts, teams
from gpool.server.store.operations.nodes import nodes
from gpool.server.store.operations.operators import rules as operations
from gpool.server.store.protocol import Operation

MAX_RESERVATIONS = 1000


async def refresh(server: Server) -> None:
    """Lays upon the scheduler what is stored, by this replica or another."""
    server.picture.use_rules(await server.store.read(operations.rules()), server.now)


async def _write(
    server: Server, who: Caller, once: Once | None, change: Operation[None], told: bytes = b""
) -> bytes:
    answered = await server.write_once(who.user, once, change, lambda _: told)
    await refresh(server)
    return answered.body


# ---- the policy


@dataclass(frozen=True, slots=True)
class Operated:
    """What holds, what of it was changed, and what a change would do."""

    policy: Policy
    change: PolicyChange
    orders: tuple[str, ...]
    dry_run: DryRun | None = None
    learnt: Learnt | None = None


def policy(server: Server) -> Operated:
    picture = server.picture
    rules, orders = picture.policy.rules, tuple(sorted(picture.policy.orders))
    return Operated(picture.policy.current, rules.policy, orders, learnt=rules.learnt)


async def try_policy(server: Server, changes: dict[str, object]) -> Operated:
    """What the change would do to those who wait; nothing is changed."""
    picture = server.picture
    change = _merged(picture.policy.rules.policy, changes)
    configured = replace(picture.policy.configured, limits=picture.policy.current.limits)
    wanted = replace(picture.policy.rules, policy=change).policy_upon(
        configured, picture.policy.orders
    )
    asked = await picture.forecasts.question(picture, server.now)
    found = await asyncio.to_thread(
        compare, asked, picture.policy.current, wanted, picture.policy.orders
    )
    return Operated(wanted, change, tuple(sorted(picture.policy.orders)), found)


async def change_policy(
    server: Server, who: Caller, changes: dict[str, object], once: Once | None
) -> Operated:
    change = _merged(server.picture.policy.rules.policy, changes)
    change.applied(
        server.picture.policy.configured, server.picture.policy.orders
    )  # refuses what makes no sense
    told = {name: "configured" if value is None else str(value) for name, value in changes.items()}
    noted = entry(server.now, who, "policy.change", **told)
    await _write(server, who, once, audited(operations.put_policy(change, server.now), [noted]))
    return policy(server)


async def learn(server: Server, who: Caller, once: Once | None) -> None:
    """How room is priced is learnt anew, soon and beside everything else; the policy says when and what."""
    noted = entry(server.now, who, "policy.learn")
    await server.write_once(who.user, once, audited(_nothing(), [noted]), lambda _: b"")
    server.learning.ask()


@operation
def _nothing() -> Operation[None]:
    yield from ()


def weights_with(server: Server, given: Mapping[Holder, float | None]) -> dict[Holder, int]:
    """Those set so far with these; None: as configured again."""
    found = dict(server.picture.policy.rules.policy.weights)
    for holder, weight in given.items():
        if weight is None:
            found.pop(holder, None)
        else:
            found[holder] = max(1, round(1000 * weight))
    return found


def _merged(before: PolicyChange, changes: dict[str, object]) -> PolicyChange:
    return replace(before, **changes)  # type: ignore[arg-type]  # checked by `PolicyRequest`


# ---- cordons


@dataclass(frozen=True, slots=True)
class NewCordon:
    node: NodeId
    why: str = ""
    drain: bool = False


@dataclass(frozen=True, slots=True)
class Cordoned:
    node: NodeId
    is_cordoned: bool
    why: str
    running: int
    preempted: int = 0


async def cordon(server: Server, who: Caller, wanted: NewCordon, once: Once | None) -> Cordoned:
    """Nothing new starts there. To drain it, what may be preempted is asked to go; the rest ends by itself."""
    node, why = wanted.node, wanted.why
    action = "node.drain" if wanted.drain else "node.cordon"
    noted = entry(server.now, who, action, encode("node", node), why=why)
    await _write(server, who, once, audited(_cordon(node, why, server.now), [noted]))
    asked = _preemptible_on(server, node) if wanted.drain else []
    recording = await make_room(server, asked) if asked else None
    preempted = len({hold.task for _, hold in recording.to_preempt}) if recording else 0
    return Cordoned(node, True, why, _running(server, node), preempted)


async def uncordon(server: Server, who: Caller, node: NodeId, once: Once | None) -> None:
    thing = encode("node", node)
    noted = entry(server.now, who, "node.uncordon", thing)
    dropping = _dropped("cordon", node, f"{thing} is not cordoned")
    await _write(server, who, once, audited(dropping, [noted]))


@operation
def _cordon(node: NodeId, why: str, at: Instant) -> Operation[None]:
    yield from _known_node(node)
    yield from operations.put_cordon(node, why, at)


@operation
def _dropped(kind: operations.Kind, id_: int, otherwise: str) -> Operation[None]:
    if not (yield from operations.drop(kind, id_)):
        raise NotFound(otherwise)


def _known_node(node: NodeId) -> Operation[None]:
    if (yield from nodes.node(node)) is None:
        raise NotFound(f"no node {encode('node', node)}; `gpool node ls` lists them")


def _preemptible_on(server: Server, node: NodeId) -> list[TaskId]:
    found = lines_on(server.picture.state, node)
    return [task for task, line in found if line.shape.preemptible]


def _running(server: Server, node: NodeId) -> int:
    known = server.picture.state.nodes.get(node)
    return len(known.lines) if known is not None else 0


# ---- reservations


@dataclass(frozen=True, slots=True)
class Wanted:
    """A reservation somebody asks for."""

    nodes: Sequence[NodeId]
    users: Sequence[UserId]
    teams: Sequence[TeamId]
    first: Instant
    last: Instant
    why: str = ""


def reservations(server: Server) -> tuple[Reservation, ...]:
    return server.picture.policy.rules.reservations


async def reserve(server: Server, who: Caller, wanted: Wanted, once: Once | None) -> Reservation:
    """Under a key already used: the reservation made then."""
    if not wanted.users and not wanted.teams:
        raise Invalid("say for whom: 'users' or 'teams'")
    if not wanted.first < wanted.last:
        raise Invalid("'last' is after 'first'")
    if wanted.last <= server.now:
        raise Invalid("'last' has passed already")
    audience = Audience(frozenset(wanted.users), frozenset(wanted.teams))
    one = Reservation(
        server.ids.next(), frozenset(wanted.nodes), audience, wanted.first, wanted.last, wanted.why
    )
    noted = entry(
        server.now,
        who,
        "reservation.make",
        encode("reservation", one.id),
        nodes=" ".join(encode("node", node) for node in sorted(one.nodes))[:500],
        users=" ".join(encode("user", user) for user in sorted(audience.users))[:500],
        teams=" ".join(encode("team", team) for team in sorted(audience.teams))[:500],
        why=wanted.why,
    )
    reserving = audited(_reserve(one, server.now), [noted])
    id_ = int(await _write(server, who, once, reserving, str(one.id).encode()))
    if id_ == one.id:
        return one
    for known in reservations(server):
        if known.id == id_:
            return known
    raise NotFound(f"reservation {encode('reservation', id_)} was made and has ended since")


async def unreserve(server: Server, who: Caller, id_: int, once: Once | None) -> None:
    thing = encode("reservation", id_)
    noted = entry(server.now, who, "reservation.end", thing)
    dropping = _dropped("reservation", id_, f"no reservation {thing}")
    await _write(server, who, once, audited(dropping, [noted]))


@operation
def _reserve(one: Reservation, at: Instant) -> Operation[None]:
    there: OperatorRules = yield from operations.rules()
    for old in there.reservations:  # what is over is of no use
        if old.last <= at:
            yield from operations.drop("reservation", old.id)
    if len(there.reservations) >= MAX_RESERVATIONS:
        raise Invalid(f"there are {MAX_RESERVATIONS} reservations already; end some first")
    for node in sorted(one.nodes):
        yield from _known_node(node)
    for user in sorted(one.audience.users):
        if (yield from accounts.account(UserId(user))) is None:
            raise NotFound(f"no user {encode('user', user)}")
    for team in sorted(one.audience.teams):
        if (yield from teams.team(TeamId(team))) is None:
            raise NotFound(f"no team {encode('team', team)}")
    yield from operations.put_reservation(one, at)
