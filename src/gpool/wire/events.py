"""REST documents of events, webhooks and mail notices. `python -m gpool.wire.events` prints docs/events.md."""

from __future__ import annotations

import sys
from typing import Annotated, Any, Literal, Self

from pydantic import AwareDatetime, BaseModel, Field, StringConstraints

from gpool.core.ids import encode
from gpool.core.specs.events import RETRY_DELAYS_S, EventKind
from gpool.wire.documents import Answer, Document

WebhookForm = Literal["standard", "slack", "discord", "ntfy"]
DeliveryStatus = Literal["pending", "sent", "failed"]
Kinds = Annotated[list[Annotated[str, StringConstraints(max_length=40)]], Field(max_length=40)]


class PoolEvent(Answer):
    """One event. `id` is the cursor of `GET /v1/events` and the `webhook-id` of a delivery.

    `account`: user or team that it belongs to; null: the pool.
    """

    id: str
    type: str
    timestamp: AwareDatetime
    account: str | None
    data: dict[str, Any]


class EventPage(Answer):
    items: list[PoolEvent]
    next: str | None = None


# ---- contents of `data`


class TaskEventData(Answer):
    """`attempt` counts the task's leases. `reason` and `exit_code`: of ended tasks."""

    task: str
    batch: str
    name: str
    attempt: int
    node: str | None = None
    node_name: str | None = None
    reason: str | None = None
    exit_code: int | None = None

    @classmethod
    def of(cls, *, task: int, batch: int, node: int | None, **members: Any) -> Self:
        return cls(
            task=encode("task", task),
            batch=encode("batch", batch),
            node=None if node is None else encode("node", node),
            **members,
        )


class BatchEventData(Answer):
    """All `total` tasks of a batch of two or more have ended, and no more are added."""

    batch: str
    name: str
    total: int

    @classmethod
    def of(cls, batch: int, name: str, total: int) -> Self:
        return cls(batch=encode("batch", batch), name=name, total=total)


class BudgetEventData(Answer):
    """Spending of the month (UTC): 80 % of the cap, or all of it."""

    month: str
    spent_microcredits: int
    cap_microcredits: int


class BalanceEventData(Answer):
    """The balance fell below the pool's threshold."""

    balance_microcredits: int
    threshold_microcredits: int


class PayoutEventData(Answer):
    """Share of an owner in a closed period. `payee`: wallet, or id of the account in pools without a chain."""

    month: str
    number: int
    payee: str
    microcredits: int


class NodeEventData(Answer):
    """A node without a heartbeat for longer than its leases last, or such a node that is heard again."""

    node: str
    name: str


class GpuEventData(Answer):
    """A GPU in quarantine takes no task; `why`: the fault, empty when it is healthy again."""

    gpu: str
    node: str
    node_name: str
    why: str = ""


class AlertEventData(Answer):
    """An alert of the pool's own rules (docs/runbook.md)."""

    alert: str
    severity: str
    summary: str
    labels: dict[str, str]


class PingEventData(Answer):
    """Sent by a test of the webhook; it is in no event stream."""

    webhook: str


CATALOGUE: dict[EventKind, tuple[type[BaseModel], str, str]] = {
    EventKind.TASK_STARTED: (
        TaskEventData,
        "account of the task",
        "A task started. A task that starts and ends within one report of its node has no such event.",
    ),
    EventKind.TASK_SUCCEEDED: (TaskEventData, "account of the task", "A task ended with success."),
    EventKind.TASK_FAILED: (
        TaskEventData,
        "account of the task",
        "A task ended without success and is not tried again.",
    ),
    EventKind.TASK_CANCELLED: (TaskEventData, "account of the task", "A task was cancelled."),
    EventKind.TASK_PREEMPTED: (
        TaskEventData,
        "account of the task",
        "A running task was stopped for another one or by the node's owner, and is queued again.",
    ),
    EventKind.BATCH_DONE: (BatchEventData, "account of the batch", "All tasks of a batch ended."),
    EventKind.BUDGET_WARNING: (BudgetEventData, "payer", "80 % of the month's budget are spent."),
    EventKind.BUDGET_REACHED: (BudgetEventData, "payer", "The month's budget is spent."),
    EventKind.BALANCE_LOW: (BalanceEventData, "payer", "The balance is low."),
    EventKind.PAYOUT_READY: (
        PayoutEventData,
        "paid owner",
        "A period was closed, and the owner's share of it is in the payout.",
    ),
    EventKind.NODE_LOST: (
        NodeEventData,
        "owner of the node, operators",
        "A node lost contact. Its tasks run elsewhere.",
    ),
    EventKind.NODE_BACK: (NodeEventData, "owner of the node, operators", "A lost node is back."),
    EventKind.GPU_UNHEALTHY: (
        GpuEventData,
        "owner of the node, operators",
        "A GPU is in quarantine.",
    ),
    EventKind.GPU_HEALTHY: (
        GpuEventData,
        "owner of the node, operators",
        "The quarantine of a GPU ended.",
    ),
    EventKind.ALERT_FIRING: (AlertEventData, "operators", "An alert rule fires."),
    EventKind.ALERT_RESOLVED: (AlertEventData, "operators", "A firing alert ended."),
    EventKind.PING: (PingEventData, "the tested webhook", "A test of a webhook."),
}
"""By kind: the document of `data`, the receivers, the meaning."""


# ---- webhooks


class WebhookRequest(Document):
    """`kinds`: kinds of events, a family as `task.*`; empty: all. `form`: layout of the body."""

    url: Annotated[str, StringConstraints(min_length=8, max_length=2000)]
    kinds: Kinds = Field(default_factory=list)
    form: WebhookForm = "standard"


class WebhookChange(Document):
    """Members that are absent or null stay. `enabled` true also switches on a webhook that was switched off."""

    url: Annotated[str, StringConstraints(min_length=8, max_length=2000)] | None = None
    kinds: Kinds | None = None
    enabled: bool | None = None


class WebhookDocument(Answer):
    """`why`: the reason why it was switched off. `public_key`: verifies the signatures `v1a`."""

    id: str
    account: str | None
    url: str
    form: WebhookForm
    kinds: list[str]
    enabled: bool
    why: str
    public_key: str
    created_at: AwareDatetime


class WebhookSecretDocument(WebhookDocument):
    """`secret`: key of the signatures `v1`; shown once."""

    secret: str


class WebhookPage(Answer):
    items: list[WebhookDocument]


class RotationRequest(Document):
    """`overlap_s`: seconds for which deliveries carry signatures of the old and of the new secret."""

    overlap_s: Annotated[int, Field(ge=0, le=7 * 86_400)] = 86_400


class ReplayRequest(Document):
    """`event`: send this one again; absent: all that failed since `since`."""

    event: str | None = None
    since: AwareDatetime | None = None


class ReplayDocument(Answer):
    deliveries: int


class DeliveryDocument(Answer):
    """`response`: HTTP status of the last attempt; `error`: why it failed."""

    event: str
    type: str
    status: DeliveryStatus
    attempts: int
    next_at: AwareDatetime | None
    tried_at: AwareDatetime | None
    response: int | None
    error: str


class DeliveryPage(Answer):
    items: list[DeliveryDocument]
    next: str | None = None


# ---- mail


class NoticeRequest(Document):
    """`kinds`: as of a webhook. A code is sent to the address, which confirms it."""

    address: Annotated[
        str, StringConstraints(pattern=r"^[^@\s<>,;:\\\"()\[\]]{1,64}@[A-Za-z0-9.-]{1,189}$")
    ]
    kinds: Kinds = Field(default_factory=list)


class NoticeConfirmation(Document):
    code: Annotated[str, StringConstraints(pattern=r"^[0-9]{8}$")]


class NoticeDocument(Answer):
    """Mail address to which events are sent, once it is confirmed."""

    id: str
    address: str
    kinds: list[str]
    confirmed: bool
    created_at: AwareDatetime


class NoticePage(Answer):
    items: list[NoticeDocument]


def as_markdown() -> str:
    """docs/events.md."""
    lines = [
        "# Events",
        "",
        "Generated from `gpool.wire.events.CATALOGUE`; a test fails when it is stale. How to read and",
        "receive events: [guide](guides/events.md).",
        "",
        "| type | meaning | receivers | fields of `data` |",
        "|---|---|---|---|",
    ]
    for kind, (model, whose, meaning) in CATALOGUE.items():
        fields = ", ".join(f"`{name}`" for name in model.model_fields)
        lines.append(f"| `{kind}` | {meaning} | {whose} | {fields} |")
    lines += ["", "## Fields", "", "| document | fields | meaning |", "|---|---|---|"]
    models: list[type[BaseModel]] = [PoolEvent, *(each[0] for each in CATALOGUE.values())]
    for model in dict.fromkeys(models):
        fields = ", ".join(
            f"`{name}`{'' if field.is_required() else ' (may be absent)'}"
            for name, field in model.model_fields.items()
        )
        meaning = " ".join((model.__doc__ or "").split())
        lines.append(f"| {model.__name__} | {fields} | {meaning} |")
    pauses = ", ".join(_duration(seconds) for seconds in RETRY_DELAYS_S)
    lines += [
        "",
        f"A delivery that fails is tried again after {pauses}:",
        f"{sum(RETRY_DELAYS_S) // 3600} hours in all.",
        "",
    ]
    return "\n".join(lines)


def _duration(seconds: int) -> str:
    for unit, size in (("h", 3600), ("min", 60)):
        if seconds >= size:
            return f"{seconds // size} {unit}"
    return f"{seconds} s"


if __name__ == "__main__":
    sys.stdout.write(as_markdown())
