"""REST documents for operators: server keys, audit log, policy, cordons, reservations."""

from __future__ import annotations

from typing import Annotated

from pydantic import AwareDatetime, Field, StringConstraints

from gpool.core.specs.fields import MAX_LABELS
from gpool.wire.documents import Answer, Document, Moment

_YEAR_S = 365 * 86_400
Weight = Annotated[float, Field(gt=0, le=1000)]
Why = Annotated[str, StringConstraints(max_length=500)]


class RotateRequest(Document):
    master: bool = False  # also a new master key


class KeysDocument(Answer):
    """Progress of a key rotation: done when `left` is 0."""

    data_keys: int
    retired: int
    fields: int
    left: int
    masters: int


class ReplicaDocument(Answer):
    """One server of the pool. `term`: of the leader, else 0; `nodes`: connected to it."""

    id: str
    address: str
    version: str
    leader: bool
    alive: bool
    term: int
    nodes: int
    started_at: AwareDatetime | None  # null: the only server of an SQLite database
    heard_at: AwareDatetime | None


class ReadOnlyRequest(Document):
    """`reason`: shown to everybody whose request is refused; empty: the mode ends."""

    reason: Why = ""


class ReadOnlyDocument(Answer):
    """`reason`: empty while the pool can be changed."""

    reason: str


class ReplicaPage(Answer):
    items: list[ReplicaDocument]


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
    items: list[AuditDocument]
    next: str | None = None


class AuditCheck(Answer):
    """`GET /v1/audit?verify=true`. Keep `head` where no operator can change it."""

    whole: bool
    entries: int  # up to the first invalid one
    head: str = ""
    why: str = ""


class PolicyRequest(Document):
    """Named fields change; null restores the configured value. `weights`: fair-share weights of users and teams by id; default 1."""

    order: Annotated[str, StringConstraints(max_length=100)] | None = None
    ageing_s: Annotated[float, Field(gt=0, le=_YEAR_S)] | None = None
    patience_s: Annotated[float, Field(ge=0, le=_YEAR_S)] | None = None
    weights: Annotated[dict[str, Weight | None], Field(default_factory=dict, max_length=1000)]
    dry_run: bool = False  # only report the effect on waiting tasks


class ShiftDocument(Answer):
    """Wait under both policies; null: beyond the simulated time."""

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
    """Pricing learnt from earlier tasks, and the idle capacity it leaves on later ones."""

    at: AwareDatetime
    sentence: str
    arrivals: int
    idle_percent: float
    plain_idle_percent: float | None  # by plain fragmentation gradient descent


class PolicyDocument(Answer):
    """Policy in force; `changed`: fields changed by an operator."""

    order: str
    ageing_s: float
    patience_s: float
    weights: dict[str, float]
    orders: list[str]
    changed: list[str]
    dry_run: DryRunDocument | None = None
    learnt: LearntDocument | None = None


class CertifiedRequest(Document):
    """Labels that an operator vouches for, without the prefix `certified:`; empty: none. `tier=vm`: the isolation."""

    labels: Annotated[
        list[Annotated[str, StringConstraints(max_length=200)]], Field(max_length=MAX_LABELS)
    ]


class CertifiedDocument(Answer):
    node: str
    labels: list[str]


class CordonRequest(Document):
    """No new task starts on the node; with `drain`, preemptible tasks are preempted."""

    why: Why = ""
    drain: bool = False


class CordonDocument(Answer):
    node: str
    cordoned: bool
    why: str
    running: int  # allocations still in use there
    preempted: int  # tasks asked to stop


class ReservationRequest(Document):
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
    holds: bool  # in force now


class ReservationPage(Answer):
    items: list[ReservationDocument]
    next: str | None = None


class GpuModelDocument(Answer):
    """Row of the reference table of GPU verification; rates are those of the data sheet."""

    name: str
    int8_teraops: int
    memory_gb_per_s: int
    memory_gib: int


class GpuModelPage(Answer):
    """`verifies`: GPU verification is on. `unknown`: models of lent GPUs without a row, which are unproven."""

    items: list[GpuModelDocument]
    verifies: bool
    unknown: list[str]


class AlertDocument(Answer):
    """An alert rule of the server and its state: `quiet`, `pending`, `firing`, or `unknown` (needs Prometheus)."""

    name: str
    state: str
    severity: str
    summary: str
    runbook: str
    condition: str  # in PromQL
    labels: dict[str, str] = Field(default_factory=dict)
    value: float | None = None
    since: AwareDatetime | None = None


class AlertPage(Answer):
    items: list[AlertDocument]
    evaluated_at: AwareDatetime | None = None
