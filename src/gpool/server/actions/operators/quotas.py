"""Quotas: what users and teams may have at once, set by operators, kept to at submission, upload and planning.

Running GPUs are a limit of the planner (`core.scheduling.limits`): tasks over it wait; guaranteed ones are its concern too. Queued tasks and storage are
compared with what is stored, in the transaction that adds to it, behind a lock on the account.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from gpool.core.errors import Forbidden, Invalid, NotFound, TooMany
from gpool.core.ids import NodeId, TaskId, UserId, encode
from gpool.core.model import Instant
from gpool.core.permissions import TeamId
from gpool.core.quotas import Quota
from gpool.core.scheduler.order.limits import GpuLimits, Holder
from gpool.server.actions.operators.audit import Actor, audited, entry
from gpool.server.server import Server
from gpool.server.settings import Settings
from gpool.server.store.identity_values import GivenQuota
from gpool.server.store.operation import operation
from gpool.server.store.operations.identity import accounts, teams
from gpool.server.store.operations.tasks import artifacts
from gpool.server.store.operations.tasks.artifacts import TaskOwner
from gpool.server.store.operations.tasks.submissions import Submission
from gpool.server.store.protocol import Operation
from gpool.server.store.queries import select
from gpool.wire.frames import Hold


def effective(settings: Settings, holder: Holder, given: GivenQuota) -> Quota:
    """What holds: what was given, else the default for users or for teams."""
    default = _usual(settings, holder)
    return Quota(
        *(
            said if said is not None else usual
            for said, usual in (
                (given.running_gpu_milli, default.running_gpu_milli),
                (given.queued_tasks, default.queued_tasks),
                (given.storage_bytes, default.storage_bytes),
            )
        )
    )


def _usual(settings: Settings, holder: Holder) -> Quota:
    return settings.user_quota if holder[0] == "user" else settings.team_quota


# ---- setting them


async def set_quota(
    server: Server, actor: Actor, holder: Holder, quota: GivenQuota, address: str = ""
) -> None:
    """For operators; who may is decided before. `NotFound` when there is no such user or team."""
    kind, number = holder
    sound(quota, _usual(server.settings, holder))
    thing = encode(kind, number)
    told = {
        name: "default" if value is None else str(value)
        for name, value in (
            ("running_gpu_milli", quota.running_gpu_milli),
            ("queued_tasks", quota.queued_tasks),
            ("storage_bytes", quota.storage_bytes),
            ("guaranteed_gpu_milli", quota.guaranteed_gpu_milli),
        )
    }
    noted = entry(server.now, actor, "quota.set", thing, address=address, **told)
    await server.write(audited(_set(holder, quota), [noted]))
    await refresh(server)


@operation
def _set(holder: Holder, quota: GivenQuota) -> Operation[None]:
    kind, number = holder
    there: object = (
        (yield from accounts.account(UserId(number)))
        if kind == "user"
        else (yield from teams.team(TeamId(number)))
    )
    if there is None:
        raise NotFound(f"there is no such {kind}")
    yield from teams.set_quota(kind, number, quota)


async def refresh(server: Server) -> None:
    """Tells the planner what was set, here or on another replica."""
    given = await server.store.read(teams.quotas())
    server.picture.use_limits(limits_of(server.settings, given))


def limits_of(settings: Settings, given: dict[Holder, GivenQuota]) -> GpuLimits:
    return GpuLimits(
        settings.user_quota.running_gpu_milli,
        settings.team_quota.running_gpu_milli,
        {
            holder: quota.running_gpu_milli
            for holder, quota in given.items()
            if quota.running_gpu_milli is not None
        },
        {
            holder: quota.guaranteed_gpu_milli
            for holder, quota in given.items()
            if quota.guaranteed_gpu_milli
        },
    )


def sound(quota: GivenQuota, usual: Quota) -> GivenQuota:
    """`Invalid` when more is guaranteed than may run at once; `usual`: what holds where nothing is given."""
    most = (
        quota.running_gpu_milli if quota.running_gpu_milli is not None else usual.running_gpu_milli
    )
    sure = quota.guaranteed_gpu_milli
    if sure is not None and most is not None and sure > most:
        raise Invalid(
            f"{sure / 1000:g} GPUs cannot be guaranteed where at most {most / 1000:g} may run at once; "
            "raise 'running_gpus' as well"
        )
    return quota


# ---- queued tasks


def most_queued(server: Server) -> int | None:
    """No user and no team can have more queued than this when what is asked for now is written; None: that is not known.

    To be asked in the loop, right before the write is handed to the store: what is written before it is folded (waits, or
    is held and may come back) or is still arriving. What other servers write into the same database we do not see.
    """
    picture = server.picture
    if picture.is_stale or server.settings.is_shared:
        return None
    return picture.waiting + len(picture.state.held) + picture.arriving


def rooms_in_queue(
    server: Server, submissions: Sequence[Submission], most: int | None
) -> Operation[list[TooMany | None]]:
    """For the submissions' transaction: what to say where one would queue more than its user or team may.

    Each counts for those behind it. Counting costs as much as is queued, so it is left out where `most` (of `most_queued`) is
    within the quota.
    """
    theirs = [_holders(each.user, each.team) for each in submissions]
    asked = {holder for holders in theirs for holder in holders}
    given = yield from teams.quotas_of(asked)
    limits: dict[Holder, int] = {}
    for holder in asked:
        limit = effective(server.settings, holder, given.get(holder, GivenQuota())).queued_tasks
        if limit is not None and (most is None or most > limit):
            limits[holder] = limit
    used = (yield from teams.queued_of(limits)) if limits else {}
    return [
        _taken(holders, len(each.tasks), limits, used)
        for holders, each in zip(theirs, submissions, strict=True)
    ]


def _taken(
    holders: Sequence[Holder], count: int, limits: Mapping[Holder, int], used: dict[Holder, int]
) -> TooMany | None:
    """Counts it in, unless it does not fit."""
    for holder in holders:
        if holder in limits and used[holder] + count > limits[holder]:
            return TooMany(
                f"{_whose(holder)} may have {limits[holder]} tasks waiting and has {used[holder]}; "
                f"{count} more do not fit. Wait for some to start, or ask the operator for a larger quota"
            )
    for holder in holders:
        if holder in limits:
            used[holder] += count
    return None


# ---- storage


class _StorageUse(NamedTuple):
    size_bytes: int
    copies: int


@dataclass(frozen=True, slots=True)
class Upload:
    """An artifact on its way, brought by a user or by a node under a lease."""

    sha256: str
    user: UserId | None
    node: NodeId | None = None
    lease: Hold | None = None


async def body_within(
    server: Server, upload: Upload, told_bytes: int, body: AsyncIterator[bytes]
) -> AsyncIterator[bytes]:
    """The body, as long as it fits what its owner may store; refused before the first byte when it says its size."""
    room = await server.store.read(storage_room(server.settings, upload))
    if room is None:
        return body
    if told_bytes > room[1]:
        raise _full(*room, told_bytes)
    return _counted(body, *room)


async def _counted(body: AsyncIterator[bytes], holder: Holder, room: int) -> AsyncIterator[bytes]:
    size = 0
    async for piece in body:
        size += len(piece)
        if size > room:
            raise _full(holder, room, size)
        yield piece


@operation
def storage_room(settings: Settings, upload: Upload) -> Operation[tuple[Holder, int] | None]:
    """Whose storage it takes and how much is left; None: there is no limit, or it is stored for them already."""
    holder = yield from _keeper(upload)
    if holder is None:
        return None
    given = yield from teams.quota_of(*holder)
    limit = effective(settings, holder, given).storage_bytes
    if limit is None:
        return None
    [used] = yield from select(
        _StorageUse,
        "SELECT COALESCE(SUM(size_bytes), 0), (SELECT COUNT(*) FROM stored WHERE kind = :kind AND id = :id "
        "AND sha256 = :sha256) FROM storage WHERE kind = :kind AND id = :id",
        {"kind": holder[0], "id": holder[1], "sha256": upload.sha256},
    )
    return None if used.copies else (holder, max(0, limit - int(used.size_bytes)))


@operation
def add_within(
    settings: Settings, upload: Upload, size: int, at: Instant
) -> Operation[bool | Forbidden]:
    """`artifacts.add_artifact`, if it fits. What does not is left without a reference, to be forgotten in time."""
    lease = upload.lease
    if upload.user is not None:
        yield from teams.hold_account("user", upload.user)
    room = yield from storage_room(settings, upload)
    if room is not None and size > room[1]:
        yield from artifacts.put_artifact(upload.sha256, size, at)
        return _full(*room, size)
    fence = None
    if lease is not None and upload.node is not None:
        fence = (TaskId(lease.task), lease.epoch)
    add = artifacts.add_artifact(upload.sha256, size, upload.user, upload.node, fence, at)
    return (yield from add)


def _keeper(upload: Upload) -> Operation[Holder | None]:
    """A person's upload is the person's; a node's that of the task it has a lease of."""
    if upload.user is not None:
        return "user", upload.user
    if upload.lease is None:
        return None
    owners = yield from select(
        TaskOwner,
        "SELECT user_id, team_id FROM tasks WHERE id = :task",
        {"task": upload.lease.task},
    )
    if not owners:
        return None
    [(user, team)] = owners
    return ("user", user) if team is None else ("team", team)


def _full(holder: Holder, room: int, size: int) -> Forbidden:
    return Forbidden(
        f"this artifact has {size} bytes and {_whose(holder)} may store only {room} more; "
        "ask the operator for a larger storage quota"
    )


# ---- both


def _holders(user: UserId, team: int | None) -> tuple[Holder, ...]:
    return (("user", user),) if team is None else (("user", user), ("team", team))


def _whose(holder: Holder) -> str:
    return "your account" if holder[0] == "user" else "your team"


def merged(before: GivenQuota, changes: dict[str, int | None]) -> GivenQuota:
    """For `PATCH`: what is named changes, the rest stays."""
    return replace(before, **changes)
