"""Quotas of users and teams, set by operators. Tasks over the GPU quota wait (`core.scheduler.order.limits`); queued tasks
and storage (`store.operations.tasks.storage`) are compared with the stored amounts in the adding transaction.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from gpool.core.errors import Invalid, NotFound, StorageFull, TooMany
from gpool.core.ids import NodeId, TaskId, UserId, encode
from gpool.core.model import Instant
from gpool.core.permissions import TeamId
from gpool.core.quotas import Quota
from gpool.core.scheduler.order.limits import GpuLimits, Holder
from gpool.server.actions.audit import AuditActor, audited, entry
from gpool.server.server import Server
from gpool.server.settings import Settings
from gpool.server.store.identity_values import GivenQuota
from gpool.server.store.operations.identity import accounts, teams
from gpool.server.store.operations.tasks import artifacts, storage, tasks
from gpool.server.store.operations.tasks.artifacts import StoredBytes
from gpool.server.store.operations.tasks.storage import (
    AccountUsage,
    StorageLimits,
    UploadReservation,
)
from gpool.server.store.operations.tasks.submissions import Submission
from gpool.server.store.protocol import Operation, Statement, operation
from gpool.wire.frames import Hold


def effective(settings: Settings, holder: Holder, given: GivenQuota) -> Quota:
    default = _usual(settings, holder)
    return Quota(
        *(
            given_value if given_value is not None else usual
            for given_value, usual in (
                (given.running_gpu_milli, default.running_gpu_milli),
                (given.queued_tasks, default.queued_tasks),
                (given.storage_bytes, default.storage_bytes),
            )
        )
    )


def _usual(settings: Settings, holder: Holder) -> Quota:
    return settings.user_quota if holder[0] == "user" else settings.team_quota


# ---- changes


async def set_quota(
    server: Server, actor: AuditActor, holder: Holder, quota: GivenQuota, address: str = ""
) -> None:
    """The caller has checked the permission."""
    kind, number = holder
    check(quota, _usual(server.settings, holder))
    thing = encode(kind, number)
    facts = {
        name: "default" if value is None else str(value)
        for name, value in (
            ("running_gpu_milli", quota.running_gpu_milli),
            ("queued_tasks", quota.queued_tasks),
            ("storage_bytes", quota.storage_bytes),
            ("guaranteed_gpu_milli", quota.guaranteed_gpu_milli),
        )
    }
    audit_entry = entry(server.now, actor, "quota.set", thing, address=address, **facts)
    await server.write(audited(_set(holder, quota), [audit_entry]))
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
        raise NotFound(f"no {kind} {encode(kind, number)} on this server")
    yield from teams.set_quota(kind, number, quota)


async def refresh(server: Server) -> None:
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


def check(quota: GivenQuota, usual: Quota) -> GivenQuota:
    most = (
        quota.running_gpu_milli if quota.running_gpu_milli is not None else usual.running_gpu_milli
    )
    guaranteed = quota.guaranteed_gpu_milli
    if guaranteed is not None and most is not None and guaranteed > most:
        raise Invalid(
            f"{guaranteed / 1000:g} GPUs cannot be guaranteed where at most {most / 1000:g} may run at once; "
            "raise 'running_gpus' as well"
        )
    return quota


# ---- queued tasks

LEAST_HEADROOM = 1000
UNSEEN = 0.5
SUMMED_SHAPES = 256
"""Users with more shapes in the queue are bounded by the whole queue."""


@dataclass(frozen=True, slots=True)
class QueuedBound:
    """Upper bounds of the tasks that accounts have queued when the next write commits.

    `others`: of any account. `unseen`: part of a quota that other servers may fill unseen; 0 for a single server.
    """

    others: int
    users: Mapping[UserId, int]
    unseen: float = 0.0

    def is_within(self, holder: Holder, limit: int) -> bool:
        """Whether the account is certainly within its quota, so that nothing has to be counted."""
        kind, number = holder
        most = self.users.get(UserId(number), self.others) if kind == "user" else self.others
        room = max(LEAST_HEADROOM, limit * self.unseen) if self.unseen else 0
        return most + room <= limit


def most_queued(server: Server, users: Iterable[UserId]) -> QueuedBound | None:
    """Bounds for these users and, together, all other accounts; None: unknown.

    Call on the event loop right before passing the write to the store: every earlier write is then folded (waiting, or
    held and able to return) or still arriving. A replica sees submissions at others up to a second late: in that time
    they add less than half of a quota, or `LEAST_HEADROOM`.
    """
    picture = server.picture
    if picture.is_stale:
        return None
    state = picture.state
    moving = len(state.held) + picture.arriving + len(picture.rejected)
    bounds: dict[UserId, int] = {}
    for user in users:
        shapes = state.queues.shapes_of(user)
        if len(shapes) <= SUMMED_SHAPES:
            bounds[user] = moving + sum(shape.queue.size for shape in shapes)
    return QueuedBound(
        picture.waiting + len(state.held) + picture.arriving,
        bounds,
        UNSEEN if server.settings.is_shared else 0.0,
    )


def holders_of(submissions: Iterable[Submission]) -> set[Holder]:
    return {holder for each in submissions for holder in _holders(each.user, each.team)}


def queue_quota_errors(
    server: Server,
    submissions: Sequence[Submission],
    most: QueuedBound | None,
    usage: Iterable[AccountUsage],
) -> Operation[list[TooMany | None]]:
    """For each submission, the error if it exceeds the queue quota of its user or team, as if they came in turn.

    Part of their transaction, which has read the `usage` of `holders_of`. Counting costs time in proportion to the
    account's queue, so it is skipped if `most` (of `most_queued`) is within the quota.
    """
    limits: dict[Holder, int] = {}
    for row in usage:
        usual = _usual(server.settings, row.account).queued_tasks
        limit = row.queued_tasks if row.queued_tasks is not None else usual
        if limit is not None and (most is None or not most.is_within(row.account, limit)):
            limits[row.account] = limit
    used = (yield from teams.queued_of(limits)) if limits else {}
    return [
        _charge(_holders(each.user, each.team), len(each.tasks), limits, used)
        for each in submissions
    ]


def _charge(
    holders: Sequence[Holder], count: int, limits: Mapping[Holder, int], used: dict[Holder, int]
) -> TooMany | None:
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


# ---- the pool's queue

QUEUE_LOCK = 0x6770717565  # "gpque"


@dataclass(slots=True)
class QueueRoom:
    """Tasks that the pool's queue still takes in one transaction; None: it is far from full."""

    limit: int
    waiting: int | None = None

    def refusal(self, count: int) -> TooMany | None:
        """Take room for so many tasks, or return the error."""
        if self.waiting is None:
            return None
        if self.waiting + count > self.limit:
            return queue_is_full(self.waiting)
        self.waiting += count
        return None


def queue_room(server: Server) -> Operation[QueueRoom]:
    """Count the queue, if it is nearly full and has several servers; their submissions then wait for this commit.

    A replica sees submissions of the others up to a second late: fewer than a tenth of the queue, or `LEAST_HEADROOM`.
    """
    limit, picture = server.settings.max_queued, server.picture
    waiting = picture.waiting + picture.arriving
    is_far = waiting + max(LEAST_HEADROOM, limit // 10) <= limit and not picture.is_stale
    if not server.settings.is_shared or is_far:
        return QueueRoom(limit)
    yield Statement(f"SELECT 1 /*postgresql FROM pg_advisory_xact_lock({QUEUE_LOCK})*/")  # noqa: S608
    return QueueRoom(limit, (yield from tasks.queued_count(None, None, limit)))


def queue_is_full(waiting: int) -> TooMany:
    return TooMany(f"the queue is full with {waiting} waiting tasks; try again later")


# ---- storage


@dataclass(frozen=True, slots=True)
class StoredUpload:
    sha256: str
    user: UserId | None
    node: NodeId | None = None
    lease: Hold | None = None
    team_key: int | None = None  # API key for one team, which alone sees the upload


@operation
def finish_upload(
    upload: StoredUpload,
    room: UploadReservation,
    size: int,
    limits: StorageLimits,
    at: Instant,
    stored: StoredBytes,
) -> Operation[bool | StorageFull]:
    """Replace the upload's reservation by the artifact. Refused bytes are not recorded; the caller removes them.

    False: the node does not hold the lease any more, or a direct upload lost its reservation, whose bytes are discarded.
    """
    if room.number == storage.DIRECT and not (yield from storage.holds_object(room, stored.object)):
        return False
    yield from storage.take_reservation(room)
    is_new = not (yield from storage.is_stored(room.account, upload.sha256))
    left = (yield from storage.rooms([room.account], limits)).get(room.account, size)
    if is_new and size > left:
        return storage.storage_full(room.account, "this artifact", size, left)
    fence = None
    if upload.lease is not None and upload.node is not None:
        fence = (TaskId(upload.lease.task), upload.lease.epoch)
    add = artifacts.add_artifact(
        upload.sha256, size, upload.user, upload.node, fence, at, upload.team_key, stored
    )
    return (yield from add)


# ---- accounts


def _holders(user: UserId, team: int | None) -> tuple[Holder, ...]:
    return (("user", user),) if team is None else (("user", user), ("team", team))


def _whose(holder: Holder) -> str:
    return "your account" if holder[0] == "user" else "your team"


def merged(before: GivenQuota, changes: dict[str, int | None]) -> GivenQuota:
    return replace(before, **changes)
