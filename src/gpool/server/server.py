"""The server as one value: the services every action needs, wired in `app`. Holds no rules."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Generic, TypeVar

from gpool.core.ids import IdSource
from gpool.core.model import Instant
from gpool.server.actions.tasks.repeated import RepeatedRequests
from gpool.server.alerts.monitor import PoolMonitor
from gpool.server.blobs import Blobs
from gpool.server.clock import Clock
from gpool.server.events.services import EventServices
from gpool.server.identity.audit import RecentReads, RefusedSignIns
from gpool.server.identity.authorization import Credentials
from gpool.server.identity.certificates import Certificate
from gpool.server.identity.node_proofs import NodeAuthenticator
from gpool.server.identity.passwords import PasswordCost, Passwords
from gpool.server.identity.refresh_tokens import RefreshTerms
from gpool.server.identity.sealer import Sealer
from gpool.server.identity.signing_keys import TokenSigner
from gpool.server.identity.throttle import Guard
from gpool.server.metrics import Metrics
from gpool.server.nodes.gpu_verifier import GpuVerifier
from gpool.server.nodes.guards import FrameBudgets
from gpool.server.nodes.reconciliation import OfferTerms
from gpool.server.nodes.registry import NodeRegistry
from gpool.server.nodes.reports import ReportBatches
from gpool.server.nodes.telemetry import Telemetry
from gpool.server.outbound import Outbound
from gpool.server.overload.admission import AdmissionController
from gpool.server.read_only import ReadOnlyMode
from gpool.server.receipts.signer import ReceiptSigner
from gpool.server.replicas.membership import Replica, SoleServer
from gpool.server.scheduling.explanations import Explainer
from gpool.server.scheduling.learning import TrainingRequests
from gpool.server.scheduling.picture import StatePicture
from gpool.server.scheduling.scheduler import Scheduler
from gpool.server.settings import Settings
from gpool.server.store.batching import WriteBatcher
from gpool.server.store.operations.tasks import idempotency
from gpool.server.store.protocol import Operation, Store, brief, is_brief
from gpool.server.store.read_cache import ReadCache
from gpool.server.store.values import User
from gpool.server.wakeups import Hub, Turns
from gpool.version import installed_version

T = TypeVar("T")
VERSION = installed_version()


@dataclass(frozen=True, slots=True)
class Once:
    key: str
    fingerprint: str


@dataclass(frozen=True, slots=True)
class Answered(Generic[T]):
    """`value` None: done before under the same key."""

    value: T | None
    body: bytes


@dataclass(frozen=True)
class SignInServices:
    sealer: Sealer
    signing: TokenSigner
    receipts: ReceiptSigner
    outbound: Outbound
    terms: RefreshTerms
    cost: PasswordCost = field(default_factory=PasswordCost)
    reads: RecentReads = field(default_factory=RecentReads)  # by operators, in the audit record
    refusals: RefusedSignIns = field(default_factory=RefusedSignIns)

    @cached_property
    def passwords(self) -> Passwords:
        """Created at first use: its decoy costs as much as hashing a password."""
        return Passwords(self.cost)

    async def close(self) -> None:
        if "passwords" in self.__dict__:
            self.passwords.close()
        await self.outbound.close()


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
    gate: NodeAuthenticator
    metrics: Metrics
    sealer: Sealer
    guard: Guard
    submitting: WriteBatcher[Any, Any, Any]  # of `actions.tasks.submit`
    sign_ins: SignInServices | None = None  # None: only schedules (simulations)
    certificate: Certificate | None = None  # None: plain HTTP
    examiner: GpuVerifier | None = None  # None: no GPU verification
    telemetry: Telemetry = field(default_factory=Telemetry)
    monitor: PoolMonitor = field(default_factory=PoolMonitor)
    learning: TrainingRequests = field(default_factory=TrainingRequests)
    explaining: Explainer = field(default_factory=Explainer)
    replica: Replica = field(default_factory=SoleServer)
    read_only: ReadOnlyMode = field(default_factory=ReadOnlyMode)
    turns: Turns = field(default_factory=Turns)
    repeated: RepeatedRequests = field(default_factory=RepeatedRequests)
    reads: ReadCache = field(default_factory=ReadCache)
    admission: AdmissionController = field(default_factory=AdmissionController)
    events: EventServices = field(default_factory=EventServices)
    paces: FrameBudgets = field(default_factory=lambda: FrameBudgets(0.0))  # frame budgets of nodes

    @property
    def now(self) -> Instant:
        return self.clock.now()

    @property
    def offer_terms(self) -> OfferTerms:
        proof = self.examiner is not None and self.examiner.verifies
        return OfferTerms(self.settings.owner_quota, proof)

    @property
    def pinned(self) -> str | None:
        """Fingerprint of the own certificate, which clients pin; None: an authority vouches, or plain HTTP."""
        return self.certificate.fingerprint if self.certificate and self.certificate.own else None

    @property
    def identity(self) -> SignInServices:
        assert self.sign_ins is not None, "this server has no sign-in services"
        return self.sign_ins

    async def write(self, operation: Operation[T]) -> T:
        """Commit; returns in commit order, so fold the result before the next await (see `StatePicture.commit`)."""
        with self.picture.commit():
            return await self.store.write(operation)

    async def write_once(
        self, user: User, once: Once | None, operation: Operation[T], encode: Callable[[T], bytes]
    ) -> Answered[T]:
        if once is None:
            value = await self.write(operation)
            return Answered(value, encode(value))
        kept = idempotency.once(user.id, once.key, once.fingerprint, self.now, operation, encode)
        if is_brief(operation):
            kept = brief(kept)
        return Answered(*await self.write(kept))
