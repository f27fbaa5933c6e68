"""Quotas of users and teams, set by operators. Tasks over the GPU quota wait (`core.scheduler.order.limits`); queued tasks
and storage (`store.operations.tasks.storage`) are compared with the stored amounts in the adding transaction.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
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
from gpool.server.store.operations.tasks import artifacts, storage
from gpool.server.store.operations.tasks.storage import StorageLimits, UploadReservation
from gpool.server.store.operations.tasks.submissions import Submission
from gpool.server.store.protocol import Operation, operation
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


def most_queued(server: Server) -> int | None:
    """Upper bound of the tasks any user or team has queued when the next write commits; None: unknown.

    Call on the event loop right before passing the write to the store: every earlier write is then folded (waiting, or
    held and able to return) or still arriving. Writes of other servers are not seen.
    """
    picture = server.picture
    if picture.is_stale or server.settings.is_shared:
        return None
    return picture.waiting + len(picture.state.held) + picture.arriving


def queue_quota_errors(
    server: Server, submissions: Sequence[Submission], most: int | None
) -> Operation[list[TooMany | None]]:
    """For each submission, the error if it exceeds the queue quota of its user or team, as if they came in turn.

    Part of their transaction. Counting costs time in proportion to the queue, so it is skipped if `most` (of
    `most_queued`) is within the quota.
    """
    holders_of_each = [_holders(each.user, each.team) for each in submissions]
    asked = {holder for holders in holders_of_each for holder in holders}
    given = yield from teams.quotas_of(asked)
    limits: dict[Holder, int] = {}
    for holder in asked:
        limit = effective(server.settings, holder, given.get(holder, GivenQuota())).queued_tasks
        if limit is not None and (most is None or most > limit):
            limits[holder] = limit
    used = (yield from teams.queued_of(limits)) if limits else {}
    return [
        _charge(holders, len(each.tasks), limits, used)
        for holders, each in zip(holders_of_each, submissions, strict=True)
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
    object_: str = "",
) -> Operation[bool | StorageFull]:
    """Replace the upload's reservation by the artifact. Refused bytes get no reference and are pruned.

    False: the node does not hold the lease any more, or a direct upload lost its reservation, whose bytes are discarded.
    `object_`: its key in the object store.
    """
    if room.number == storage.DIRECT and not (yield from storage.holds_object(room, object_)):
        return False
    yield from storage.take_reservation(room)
    is_new = not (yield from storage.is_stored(room.account, upload.sha256))
    left = (yield from storage.rooms([room.account], limits)).get(room.account, size)
    if is_new and size > left:
        yield from artifacts.leave_to_prune(upload.sha256, size, object_)
        return storage.storage_full(room.account, "this artifact", size, left)
    fence = None
    if upload.lease is not None and upload.node is not None:
        fence = (TaskId(upload.lease.task), upload.lease.epoch)
    add = artifacts.add_artifact(
        upload.sha256, size, upload.user, upload.node, fence, at, upload.team_key, object_
    )
    if not (yield from add):
        yield from artifacts.leave_to_prune(upload.sha256, size, object_)
        return False
    return True


# ---- accounts


def _holders(user: UserId, team: int | None) -> tuple[Holder, ...]:
    return (("user", user),) if team is None else (("user", user), ("team", team))


def _whose(holder: Holder) -> str:
    return "your account" if holder[0] == "user" else "your team"


def merged(before: GivenQuota, changes: dict[str, int | None]) -> GivenQuota:
    return replace(before, **changes)
