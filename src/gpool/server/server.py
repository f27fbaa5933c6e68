"""The server as one value: what every action needs. Wired in `app`; holds no rules of its own."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from gpool.core.ids import IdSource
from gpool.core.model import Instant
from gpool.server.blobs import Blobs
from gpool.server.clock import Clock
from gpool.server.gpu_verification.verifier import GpuVerifier
from gpool.server.identity.certificates import Certificate
from gpool.server.identity.credentials import Credentials
from gpool.server.identity.node_proofs.verifier import NodeGate
from gpool.server.identity.secrets.sealer import Sealer
from gpool.server.identity.services import SignIns
from gpool.server.identity.sign_in_guard import Guard
from gpool.server.metrics import Metrics
from gpool.server.nodes.frame_budget import FrameBudgets
from gpool.server.nodes.registry import NodeRegistry
from gpool.server.nodes.report_batches import ReportBatches
from gpool.server.nodes.telemetry import Telemetry
from gpool.server.scheduling.explanations import Explainer
from gpool.server.scheduling.picture import StatePicture
from gpool.server.scheduling.pricing_training import TrainingRequests
from gpool.server.scheduling.scheduler import Scheduler
from gpool.server.settings import Settings
from gpool.server.store.batching import Gathering
from gpool.server.store.operation import brief, is_brief
from gpool.server.store.operations.tasks import idempotency
from gpool.server.store.protocol import Operation, Store
from gpool.server.store.values import User
from gpool.server.wakeups import Hub

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Once:
    """A request that must happen at most once: its Idempotency-Key, and what was asked under it."""

    key: str
    fingerprint: str


@dataclass(frozen=True, slots=True)
class Answered(Generic[T]):
    """What an operation gave (None: it happened before, under the same key) and the answer saved for it."""

    value: T | None
    body: bytes


@dataclass(frozen=True, slots=True)
class Server:
    settings: Settings
    store: Store
    clock: Clock
    ids: IdSource
    hub: Hub
    nodes: NodeRegistry
    picture: StatePicture
    scheduler: Scheduler
    reports: ReportBatches
    blobs: Blobs
    credentials: Credentials
    gate: NodeGate
    metrics: Metrics
    sealer: Sealer
    guard: Guard
    submitting: Gathering[Any, Any, Any]  # of `actions.submit`
    sign_ins: SignIns | None = None  # None: a server that only schedules
    certificate: Certificate | None = None  # None: plain HTTP
    examiner: GpuVerifier | None = None  # None: GPUs are neither measured nor examined
    telemetry: Telemetry = field(default_factory=Telemetry)
    learning: TrainingRequests = field(default_factory=TrainingRequests)
    explaining: Explainer = field(default_factory=Explainer)
    paces: FrameBudgets = field(default_factory=lambda: FrameBudgets(0.0))  # of what nodes send

    @property
    def now(self) -> Instant:
        return self.clock.now()

    @property
    def identity(self) -> SignIns:
        assert self.sign_ins is not None, "this server signs nobody in"
        return self.sign_ins

    async def write(self, operation: Operation[T]) -> T:
        """Commit; returns in commit order, so fold the result before the next await (see `StatePicture.commit`)."""
        with self.picture.commit():
            return await self.store.write(operation)

    async def write_once(
        self, user: User, once: Once | None, operation: Operation[T], encode: Callable[[T], bytes]
    ) -> Answered[T]:
        """Like `write`; under a key already used the first answer comes back, without a value."""
        if once is None:
            value = await self.write(operation)
            return Answered(value, encode(value))
        kept = idempotency.once(user.id, once.key, once.fingerprint, self.now, operation, encode)
        if is_brief(operation):
            kept = brief(kept)
        return Answered(*await self.write(kept))
