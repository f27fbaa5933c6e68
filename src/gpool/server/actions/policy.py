"""Operator changes: policy, cordons, reservations, key rotation. Routes check the permission.

A change is stored and audited in one transaction, then applied; other replicas apply it at their next refresh.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from gpool.core.errors import Invalid, NotFound
from gpool.core.gpu_verification import make_of
from gpool.core.ids import NodeId, TaskId, UserId, decode, encode
from gpool.core.model import Audience, Instant
from gpool.core.permissions import TeamId
from gpool.core.scheduler.order.limits import Holder
from gpool.core.scheduler.order.orders import Policy
from gpool.core.scheduler.place.portfolio import Learnt
from gpool.core.scheduler.predict.simulation import DryRun, compare
from gpool.core.scheduler.state.operator_rules import OperatorRules, PolicyChange, Reservation
from gpool.core.specs import fields
from gpool.server.actions.audit import AuditActor, audited, entry, note
from gpool.server.actions.tasks.query import preempt_tasks
from gpool.server.identity.sealer import KeyStatus
from gpool.server.scheduling.delivery import lines_on
from gpool.server.server import Once, Server
from gpool.server.settings import span
from gpool.server.store.identity_values import Caller
from gpool.server.store.operations import nodes, recovery
from gpool.server.store.operations import rules as operations
from gpool.server.store.operations.identity import accounts, teams
from gpool.server.store.protocol import Operation, operation
from gpool.wire.admin import GpuModelDocument, GpuModelPage, PolicyRequest

MAX_RESERVATIONS = 1000
MAX_UNKNOWN = 100
"""Models of lent GPUs shown that the table lacks."""


async def refresh(server: Server) -> None:
    rules = await server.store.read(operations.rules())
    server.picture.use_rules(rules, server.now)
    if server.read_only.set(rules.read_only):
        for connection in server.nodes.connections:
            if connection.is_behind:
                why = "the pool can be changed again; connect again"
                connection.refuse("conflict", why, retry=True)


async def set_read_only(server: Server, who: Caller, reason: str, once: Once | None) -> str:
    """Begin the read-only mode, or end it with an empty reason."""
    facts = {"reason": reason} if reason else {}
    audit_entry = entry(server.now, who, "server.read_only", "on" if reason else "off", **facts)
    change = recovery.set_read_only(reason, server.now)
    await _write(server, who, once, audited(change, [audit_entry]))
    return server.read_only.reason


async def _write(
    server: Server, who: Caller, once: Once | None, change: Operation[None], facts: bytes = b""
) -> bytes:
    answered = await server.write_once(who.user, once, change, lambda _: facts)
    await refresh(server)
    return answered.body


# ---- policy


@dataclass(frozen=True, slots=True)
class PolicyState:
    policy: Policy
    change: PolicyChange
    orders: tuple[str, ...]
    dry_run: DryRun | None = None
    learnt: Learnt | None = None


def policy(server: Server) -> PolicyState:
    picture = server.picture
    rules, orders = picture.policy.rules, tuple(sorted(picture.policy.orders))
    return PolicyState(picture.policy.current, rules.policy, orders, learnt=rules.learnt)


async def try_policy(server: Server, changes: dict[str, object]) -> PolicyState:
    picture = server.picture
    change = _merged(picture.policy.rules.policy, changes)
    configured = replace(picture.policy.configured, limits=picture.policy.current.limits)
    wanted = replace(picture.policy.rules, policy=change).policy_upon(
        configured, picture.policy.orders
    )
    question = await picture.forecasts.question(picture, server.now)
    found = await asyncio.to_thread(
        compare, question, picture.policy.current, wanted, picture.policy.orders
    )
    return PolicyState(wanted, change, tuple(sorted(picture.policy.orders)), found)


async def change_policy(
    server: Server, who: Caller, changes: dict[str, object], once: Once | None
) -> PolicyState:
    change = _merged(server.picture.policy.rules.policy, changes)
    change.applied(
        server.picture.policy.configured, server.picture.policy.orders
    )  # raises `Invalid`
    facts = {name: "configured" if value is None else str(value) for name, value in changes.items()}
    audit_entry = entry(server.now, who, "policy.change", **facts)
    await _write(
        server, who, once, audited(operations.put_policy(change, server.now), [audit_entry])
    )
    return policy(server)


async def learn(server: Server, who: Caller, once: Once | None) -> None:
    audit_entry = entry(server.now, who, "policy.learn")
    await server.write_once(who.user, once, audited(_nothing(), [audit_entry]), lambda _: b"")
    server.learning.ask()


@operation
def _nothing() -> Operation[None]:
    yield from ()


def weights_with(server: Server, given: Mapping[Holder, float | None]) -> dict[Holder, int]:
    found = dict(server.picture.policy.rules.policy.weights)
    for holder, weight in given.items():
        if weight is None:
            found.pop(holder, None)
        else:
            found[holder] = max(1, round(1000 * weight))
    return found


def changes_of(server: Server, wanted: PolicyRequest) -> dict[str, object]:
    """Changes that a request names; None restores the configured value."""
    named = wanted.model_fields_set
    changes: dict[str, object] = {}
    if "order" in named:
        changes["order"] = wanted.order
    for field, name in (("ageing_s", "ageing"), ("patience_s", "patience")):
        if field in named:
            value = getattr(wanted, field)
            changes[name] = None if value is None else span(value)
    if wanted.weights:
        given = {_holder(text): value for text, value in wanted.weights.items()}
        changes["weights"] = weights_with(server, given)
    return changes


def _holder(text: str) -> Holder:
    if text.startswith("tm-"):
        return "team", decode("team", text)
    return "user", decode("user", text)


def _merged(before: PolicyChange, changes: dict[str, object]) -> PolicyChange:
    return replace(before, **changes)  # type: ignore[arg-type]  # checked by `PolicyRequest`


# ---- cordons


@dataclass(frozen=True, slots=True)
class NewCordon:
    node: NodeId
    why: str = ""
    drain: bool = False


@dataclass(frozen=True, slots=True)
class CordonState:
    node: NodeId
    is_cordoned: bool
    why: str
    running: int
    preempted: int = 0


async def cordon(server: Server, who: Caller, wanted: NewCordon, once: Once | None) -> CordonState:
    node, why = wanted.node, wanted.why
    action = "node.drain" if wanted.drain else "node.cordon"
    audit_entry = entry(server.now, who, action, encode("node", node), why=why)
    await _write(server, who, once, audited(_cordon(node, why, server.now), [audit_entry]))
    asked = _preemptible_on(server, node) if wanted.drain else []
    recording = await preempt_tasks(server, asked) if asked else None
    preempted = len({hold.task for _, hold in recording.to_preempt}) if recording else 0
    return CordonState(node, True, why, _running(server, node), preempted)


async def uncordon(server: Server, who: Caller, node: NodeId, once: Once | None) -> None:
    thing = encode("node", node)
    audit_entry = entry(server.now, who, "node.uncordon", thing)
    dropping = _dropped("cordon", node, f"{thing} is not cordoned")
    await _write(server, who, once, audited(dropping, [audit_entry]))


async def certify(
    server: Server, who: Caller, node: NodeId, labels: Sequence[str], once: Once | None
) -> tuple[str, ...]:
    """Replace the certified labels of a node; none: remove the certification."""
    wanted = fields.normal_labels(labels)
    facts = {"labels": " ".join(wanted)[:500]}
    audit_entry = entry(server.now, who, "node.certify", encode("node", node), **facts)
    await _write(server, who, once, audited(_certify(node, wanted, server.now), [audit_entry]))
    return wanted


@operation
def _certify(node: NodeId, labels: tuple[str, ...], at: Instant) -> Operation[None]:
    yield from _known_node(node)
    if labels:
        yield from operations.put_certified(node, labels, at)
    else:
        yield from operations.drop("certified", node)


@operation
def _cordon(node: NodeId, why: str, at: Instant) -> Operation[None]:
    yield from _known_node(node)
    yield from operations.put_cordon(node, why, at)


@operation
def _dropped(kind: operations.RuleKind, id_: int, otherwise: str) -> Operation[None]:
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
class NewReservation:
    nodes: Sequence[NodeId]
    users: Sequence[UserId]
    teams: Sequence[TeamId]
    first: Instant
    last: Instant
    why: str = ""


def gpu_models(server: Server) -> GpuModelPage:
    """Return the reference table of GPU verification, and lent models that it lacks (the first hundred)."""
    verifier = server.examiner
    models = {} if verifier is None else verifier.models
    nodes_here = [each.node for each in server.picture.state.nodes.values() if each.node]
    unknown = {
        gpu.model
        for node in nodes_here
        for gpu in node.offer.gpus
        if not gpu.simulated and make_of(gpu.model, gpu.memory_bytes, models) is None
    }
    return GpuModelPage(
        items=[
            GpuModelDocument(
                name=name,
                int8_teraops=make.teraops,
                memory_gb_per_s=make.gigabytes_per_s,
                memory_gib=make.memory_gib,
            )
            for name, make in sorted(models.items())
        ],
        verifies=verifier is not None and verifier.verifies,
        unknown=sorted(unknown)[:MAX_UNKNOWN],
    )


def reservations(server: Server) -> tuple[Reservation, ...]:
    return server.picture.policy.rules.reservations


async def reserve(
    server: Server, who: Caller, wanted: NewReservation, once: Once | None
) -> Reservation:
    if not wanted.users and not wanted.teams:
        raise Invalid("a reservation needs 'users' or 'teams'")
    if not wanted.first < wanted.last:
        raise Invalid("'last' must be after 'first'")
    if wanted.last <= server.now:
        raise Invalid("'last' must be in the future")
    audience = Audience(frozenset(wanted.users), frozenset(wanted.teams))
    one = Reservation(
        server.ids.next(), frozenset(wanted.nodes), audience, wanted.first, wanted.last, wanted.why
    )
    audit_entry = entry(
        server.now,
        who,
        "reservation.make",
        encode("reservation", one.id),
        nodes=" ".join(encode("node", node) for node in sorted(one.nodes))[:500],
        users=" ".join(encode("user", user) for user in sorted(audience.users))[:500],
        teams=" ".join(encode("team", team) for team in sorted(audience.teams))[:500],
        why=wanted.why,
    )
    reserving = audited(_reserve(one, server.now), [audit_entry])
    id_ = int(await _write(server, who, once, reserving, str(one.id).encode()))
    if id_ == one.id:
        return one
    for known in reservations(server):
        if known.id == id_:
            return known
    raise NotFound(f"reservation {encode('reservation', id_)} was created and has ended since")


async def unreserve(server: Server, who: Caller, id_: int, once: Once | None) -> None:
    thing = encode("reservation", id_)
    audit_entry = entry(server.now, who, "reservation.end", thing)
    dropping = _dropped("reservation", id_, f"no reservation {thing}")
    await _write(server, who, once, audited(dropping, [audit_entry]))


@operation
def _reserve(one: Reservation, at: Instant) -> Operation[None]:
    there: OperatorRules = yield from operations.rules()
    for old in there.reservations:  # ended reservations are deleted here
        if old.last <= at:
            yield from operations.drop("reservation", old.id)
    if len(there.reservations) >= MAX_RESERVATIONS:
        raise Invalid(
            f"there are {MAX_RESERVATIONS} reservations already, the limit; delete some first"
        )
    for node in sorted(one.nodes):
        yield from _known_node(node)
    for user in sorted(one.audience.users):
        if (yield from accounts.account(UserId(user))) is None:
            raise NotFound(f"no user {encode('user', user)}")
    for team in sorted(one.audience.teams):
        if (yield from teams.team(TeamId(team))) is None:
            raise NotFound(f"no team {encode('team', team)}")
    yield from operations.put_reservation(one, at)


# ---- server keys


async def rotate_keys(
    server: Server, actor: AuditActor, *, master: bool, address: str = ""
) -> KeyStatus:
    """Retire every data key; the background moves sealed fields to a new one. `master` rotates the master key first."""
    if master:
        wrapped = await server.sealer.rotate_master()
        rotated = {"address": address, "wrapped": str(wrapped)}
        await note(server, entry(server.now, actor, "keys.rotate_master", **rotated))
    audit_entry = entry(server.now, actor, "keys.rotate", address=address)
    await server.write(audited(server.sealer.rotation(server.now), [audit_entry]))
    await server.sealer.look_again()
    server.sealer.wake.call()
    return await server.sealer.status()
