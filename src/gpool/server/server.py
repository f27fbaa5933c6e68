"""The server as one value: what every action needs. Wired in `app`; holds no rules of its own."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from gpool.core.errors import GpoolError
from gpool.core.ids import IdSource
from gpool.core.model import Instant
from gpool.server.blobs import Blobs
from gpool.server.clock import Clock
from gpool.server.gpu_verification.verifier import Examiner
from gpool.server.identity.certificates import Certificate
from gpool.server.identity.credentials import Credentials
from gpool.server.identity.node_proofs.verifier import NodeGate
from gpool.server.identity.secrets.sealer import Sealer
from gpool.server.identity.services import SignIns
from gpool.server.identity.sign_in_guard import Guard
from gpool.server.metrics import Metrics
from gpool.server.nodes.frame_budget import Paces
from gpool.server.nodes.telemetry import Telemetry
from gpool.server.scheduling.explaining import Explaining
from gpool.server.scheduling.pricing_training import Asking
from gpool.server.scheduling.scheduler import Scheduler
from gpool.server.settings import Settings
from gpool.server.store.batching import WriteBatcher
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
    scheduler: Scheduler
    blobs: Blobs
    credentials: Credentials
    gate: NodeGate
    metrics: Metrics
    sealer: Sealer
    guard: Guard
    submitting: WriteBatcher[Any, Any, Any]  # of `actions.submit`
    sign_ins: SignIns | None = None  # None: a server that only schedules
    certificate: Certificate | None = None  # None: plain HTTP
    examiner: Examiner | None = None  # None: GPUs are neither measured nor examined
    telemetry: Telemetry = field(default_factory=Telemetry)
    learning: Asking = field(default_factory=Asking)
    explaining: Explaining = field(default_factory=Explaining)
    paces: Paces = field(default_factory=lambda: Paces(0.0))  # of what nodes send

    @property
    def now(self) -> Instant:
        return self.clock.now()

    @property
    def identity(self) -> SignIns:
        assert self.sign_ins is not None, "this server signs nobody in"
        return self.sign_ins

    async def write(self, operation: Operation[T]) -> T:
        """Commits, and returns in commit order: fold what it gave before the next await.

        When the caller is cancelled or the commit fails we cannot know what was written: the scheduler looks again.
        """
        try:
            return await self.store.write(operation)
        except GpoolError as error:
            if error.status >= 500:  # the commit itself failed
                self.scheduler.doubt()
            raise
        except BaseException:
            self.scheduler.doubt()
            raise

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
