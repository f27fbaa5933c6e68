"""REST documents for operators: the server's keys, the audit record, the policy and what is kept for whom."""

from __future__ import annotations

from typing import Annotated

from pydantic import AwareDatetime, Field, StringConstraints

from gpool.wire.documents import Answer, Document, Moment

_YEAR_S = 365 * 86_400
Weight = Annotated[float, Field(gt=0, le=1000)]
Why = Annotated[str, StringConstraints(max_length=500)]


class RotateRequest(Document):
    """`POST /v1/admin/keys/rotate`."""

    master: bool = False  # also a new master key


class KeysDocument(Answer):
    """How far a rotation is: done when `left` is 0."""

    data_keys: int
    retired: int
    fields: int
    left: int
    masters: int


class AuditDocument(Answer):
    number: int
    at: AwareDatetime
    actor: str
    action: str
    thing: str
    outcome: str
    address: str
    facts: dict[str, str]
    hash: str


class AuditPage(Answer):
    """Newest first."""

    items: list[AuditDocument]
    next: str | None = None


class AuditCheck(Answer):
    """`GET /v1/audit?verify=true`: whether the record is as it was written; keep `head` where nobody here can change it."""

    whole: bool
    entries: int  # up to the first that is wrong
    head: str = ""
    why: str = ""


class PolicyRequest(Document):
    """`PATCH /v1/admin/policy`: what is named changes, null goes back to what is configured.

    `weights` are those of users and teams in fair share, by id; 1 where none is given.
    """

    order: Annotated[str, StringConstraints(max_length=100)] | None = None
    ageing_s: Annotated[float, Field(gt=0, le=_YEAR_S)] | None = None
    patience_s: Annotated[float, Field(ge=0, le=_YEAR_S)] | None = None
    weights: Annotated[dict[str, Weight | None], Field(default_factory=dict, max_length=1000)]
    dry_run: bool = False  # only say what it would do to those who wait


class ShiftDocument(Answer):
    """A task that waits, and for how long by either policy (null: longer than was looked at)."""

    task: str
    before_s: float | None
    after_s: float | None


class DryRunDocument(Answer):
    sentence: str
    waiting: int
    sooner: int
    later: int
    same: int
    moved: list[ShiftDocument]


class LearntDocument(Answer):
    """How room is priced, learnt from earlier tasks, and what that leaves idle on later ones it had not seen."""

    at: AwareDatetime
    sentence: str
    arrivals: int
    idle_percent: float
    plain_idle_percent: float | None  # by plain fragmentation gradient descent


class PolicyDocument(Answer):
    """What holds; `changed` are those an operator changed."""

    order: str
    ageing_s: float
    patience_s: float
    weights: dict[str, float]
    orders: list[str]
    changed: list[str]
    dry_run: DryRunDocument | None = None
    learnt: LearntDocument | None = None


class CordonRequest(Document):
    """`PUT /v1/admin/cordons/{node}`: nothing new starts there; with `drain`, what may be preempted goes at once."""

    why: Why = ""
    drain: bool = False


class CordonDocument(Answer):
    node: str
    cordoned: bool
    why: str
    running: int  # allocations still held there
    preempted: int  # tasks asked to make room


class ReservationRequest(Document):
    """`POST /v1/admin/reservations`: nodes kept for teams or users between two times."""

    nodes: Annotated[list[str], Field(min_length=1, max_length=1000)]
    users: Annotated[list[str], Field(default_factory=list, max_length=1000)]
    teams: Annotated[list[str], Field(default_factory=list, max_length=1000)]
    first: Moment
    last: Moment
    why: Why = ""


class ReservationDocument(Answer):
    id: str
    nodes: list[str]
    users: list[str]
    teams: list[str]
    first: AwareDatetime
    last: AwareDatetime
    why: str
    holds: bool  # just now


class ReservationPage(Answer):
    items: list[ReservationDocument]
    next: str | None = None
