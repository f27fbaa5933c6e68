"""Wiring: builds `Server` from settings, and the FastAPI application around it."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from importlib import import_module
from pathlib import Path
from typing import Any

from fastapi import FastAPI

from gpool.core.errors import Invalid
from gpool.core.model import Instant
from gpool.core.scheduler.order.builtin import order_named
from gpool.core.scheduler.order.orders import Policy
from gpool.observability.tracing import Tracing
from gpool.server.actions import policy as operating
from gpool.server.actions import quotas
from gpool.server.actions.tasks import submit
from gpool.server.alerts.loops import LagLoop, MonitorPool
from gpool.server.alerts.monitor import PoolMonitor
from gpool.server.api import routing
from gpool.server.api.readiness import Readiness
from gpool.server.blobs import Blobs
from gpool.server.blobs.multipart import MultipartUploads
from gpool.server.clock import Clock, MonotonicClock, SystemClock, system_ids
from gpool.server.encryption.account_keys import AccountKeys
from gpool.server.events.recording import RecordingStore
from gpool.server.events.services import EventServices
from gpool.server.first_start import ROOT_KEY_FILE, ensure_operator, load_root_key
from gpool.server.identity.access_tokens import TokenAudience
from gpool.server.identity.authorization import Credentials
from gpool.server.identity.certificates import certificate_of
from gpool.server.identity.node_proofs import NodeAuthenticator, pool_name
from gpool.server.identity.passwords import PasswordCost
from gpool.server.identity.refresh_tokens import RefreshTerms
from gpool.server.identity.sealer import Sealer
from gpool.server.identity.signing_keys import KeyRotation, TokenSigner
from gpool.server.identity.throttle import Guard
from gpool.server.metrics import Metrics
from gpool.server.metrics.collectors import Observed, collectors
from gpool.server.metrics.registry import MeasuredStore
from gpool.server.nodes.gpu_verifier import GpuVerifier, VerificationSettings
from gpool.server.nodes.guards import FrameBudgets
from gpool.server.nodes.registry import NodeRegistry
from gpool.server.nodes.reports import ReportBatches
from gpool.server.nodes.telemetry import Telemetry
from gpool.server.outbound import Outbound
from gpool.server.overload.admission import AdmissionController, AdmissionLimits
from gpool.server.receipts.signer import ReceiptSigner
from gpool.server.recovery.anchors import LogAuditAnchors
from gpool.server.replicas.follow import leadership_changed
from gpool.server.replicas.membership import (
    Membership,
    Replica,
    SoleServer,
    database_of,
    is_replicated,
)
from gpool.server.replicas.moving import Departure
from gpool.server.replicas.shared_secrets import ROOT, SharedSecrets
from gpool.server.scheduling.loops import LoopRunner, all_loops
from gpool.server.scheduling.picture import StatePicture
from gpool.server.scheduling.policy import ActivePolicy, known_orders
from gpool.server.scheduling.prices import PlanPrices
from gpool.server.scheduling.scheduler import Scheduler
from gpool.server.server import VERSION, Server, SignInServices
from gpool.server.settings import Settings, span
from gpool.server.store.drivers.opening import open_store
from gpool.server.store.operations import recovery
from gpool.server.store.operations.tasks import storage
from gpool.server.store.protocol import Store
from gpool.server.store.read_cache import MOST_ROWS, ReadCache
from gpool.server.wakeups import Hub

OWN_FILES = (ROOT_KEY_FILE, "up.lock")  # besides the database
DAY_S = 86_400
NO_TELEMETRY: Any = {
    "tracing": False,
    "metrics": False,
    "logs": False,
    "auto_configure": False,
}
"""Off: FastAPI's telemetry reads the environment on each request and would connect to addresses there, past `outbound`."""


def private_directory(data: Path) -> None:
    """Create the data directory with mode 0700, or close an existing one to others.

    One that holds other things than a server's stays as it is: it may be a home or a system directory.
    """
    data.mkdir(parents=True, exist_ok=True, mode=0o700)
    names = os.listdir(data)
    if names and not any(name in OWN_FILES or name.startswith("gpool.db") for name in names):
        return
    if data.stat().st_uid == os.geteuid():
        data.chmod(0o700)


async def open_server(settings: Settings, clock: Clock | None = None) -> Server:
    private_directory(settings.data)
    clock = clock or SystemClock()
    if is_replicated(settings.store_url):
        server = await _open_replica(settings, clock)
    else:
        keys = account_keys(settings)
        store = await _open_store(settings, keys)
        since = await store.read(recovery.restored_at())
        server = wire(settings, store, clock, keys=keys, restored_at=since)
        await _remove_interrupted(server)
    if server.blobs.multipart is not None:
        await server.blobs.multipart.probe()
    await quotas.refresh(server)
    await operating.refresh(server)
    await server.events.subscribers.refresh(server.store, server.now)
    await server.identity.signing.ready(server.now)
    await server.picture.rebuild(server.now)
    await ensure_operator(server)
    return server


async def _open_store(settings: Settings, keys: AccountKeys) -> Store:
    return await open_store(settings.store_url, readers=settings.store_readers, keys=keys)


async def _open_replica(settings: Settings, clock: Clock) -> Server:
    """Register this server beside others of its database, and try to lead."""
    membership = Membership(
        database_of(settings.store_url),
        system_ids(clock).next(),
        settings.replica_address,
        VERSION,
        span(settings.replica_timeout_s),
    )
    keys = account_keys(settings)
    store = await membership.open_store(settings.store_readers, keys)
    try:
        return await _start_replica(settings, clock, membership, store, keys)
    except BaseException:
        await membership.stop()
        await store.close()
        raise


async def _start_replica(
    settings: Settings, clock: Clock, membership: Membership, store: Store, keys: AccountKeys
) -> Server:
    shared = SharedSecrets(store, Sealer(store, settings.master_source, clock.now))
    root_key = await shared.keep(ROOT, lambda: load_root_key(settings.data))
    await shared.place_certificate(settings, clock.now())
    has_others = await membership.others_running()
    await shared.claim_folder(settings, has_others=has_others)
    since = await store.read(recovery.restored_at())
    server = wire(settings, store, clock, membership, root_key, keys, since)
    server.reads.confirmed_s = 0.0  # until the change feed is read
    await membership.start(lambda: leadership_changed(server, membership))
    await shared.check_folder(settings)
    if not has_others:
        await _remove_interrupted(server)
    return server


async def _remove_interrupted(server: Server) -> None:
    """Remove temporary files and reserved uploads of an earlier process. No other server may run: they could be its."""
    server.blobs.remove_temporary()
    await server.store.write(storage.forget_interrupted())


def account_keys(settings: Settings) -> AccountKeys:
    return AccountKeys(settings.master_source.load, is_on=settings.encrypt_data)


def wire(
    settings: Settings,
    store: Store,
    clock: Clock,
    membership: Membership | None = None,
    root_key: bytes | None = None,
    keys: AccountKeys | None = None,
    restored_at: Instant | None = None,
) -> Server:
    """Build the server. `root_key`: shared by replicas; without it the one of the data directory. `keys`: the store's."""
    hub, metrics = Hub(), Metrics()
    if root_key is None:
        root_key = load_root_key(settings.data)
    reads = ReadCache(MOST_ROWS)
    events = EventServices()
    recording = RecordingStore(store, events.subscribers, clock.now)
    store = MeasuredStore(recording, metrics.signals.store, reads)
    remember = span(settings.key_cache_s)
    sealer = Sealer(store, settings.master_source, clock.now, keys)
    sign_ins = _sign_ins(settings, store, sealer, ReceiptSigner(store, sealer, pool_name(root_key)))
    policy, orders = Policy(order=settings.order), known_orders()
    order_named(policy.order, orders)  # Invalid for an unknown order, before anything is served
    elapsed = clock.passed if isinstance(clock, MonotonicClock) else None
    registry = NodeRegistry(metrics, settings.ttl, elapsed)
    replica: Replica = SoleServer() if membership is None else membership

    def leads() -> bool:
        return replica.leads

    def feed_lag_s() -> float:
        return (
            0.0 if membership is None else membership.feed_lag_s(registry.lease_time(clock.now()))
        )

    picture = StatePicture(
        store,
        registry,
        ActivePolicy(policy, orders),
        hub,
        metrics,
        clock.now,
        leads,
    )
    telemetry = Telemetry(is_shared=membership is not None)
    monitor = PoolMonitor()
    observed = Observed(
        picture,
        telemetry,
        monitor.survey,
        clock.now,
        is_leader=leads,
        version=VERSION,
        most_gpus=settings.metrics_gpus,
        data=settings.data,
        min_free_bytes=settings.min_free_bytes,
        feed_lag_s=feed_lag_s,
        uncleared=monitor.uncleared,
    )
    metrics.add(*collectors(observed))
    ids = system_ids(clock, None if membership is None else lambda: membership.slot)
    return Server(
        settings=settings,
        store=store,
        clock=clock,
        ids=ids,
        hub=hub,
        nodes=registry,
        picture=picture,
        scheduler=Scheduler(
            picture, sealer, metrics, PlanPrices(ids, settings.fee_ppm) if settings.prices else None
        ),
        reports=ReportBatches(picture.write, picture.absorb, settings.storage_limits),
        blobs=_blobs(settings),
        credentials=Credentials(store, clock.now, remember, root_key, sign_ins.signing),
        gate=NodeAuthenticator(
            store,
            clock.now,
            root_key,
            remember=remember,
            is_shared=membership is not None,
            since=restored_at or Instant(0),
        ),
        metrics=metrics,
        sealer=sealer,
        guard=Guard(clock.now),
        submitting=submit.batching(),
        sign_ins=sign_ins,
        certificate=certificate_of(settings, clock.now()),
        examiner=GpuVerifier(store, picture, clock.now, VerificationSettings.of(settings)),
        telemetry=telemetry,
        monitor=monitor,
        events=events,
        paces=FrameBudgets(settings.node_frames_per_s),
        reads=reads,
        admission=AdmissionController(
            AdmissionLimits(settings.overload_delay_s, settings.overload_requests)
        ),
        replica=replica,
    )


def _blobs(settings: Settings) -> Blobs:
    folder, bucket = settings.folder, settings.bucket
    most, free = settings.max_artifact_bytes, settings.min_free_bytes
    if bucket is None:
        return Blobs(folder, most, free, encrypts=settings.encrypt_data)
    try:
        s3 = import_module("gpool.server.blobs.s3")
    except ImportError as error:
        raise Invalid("artifacts in S3 need a package: pip install 'gpool[s3]'") from error
    # the store compares the signature's time with the time of day, not with a simulated clock
    return Blobs(
        folder,
        most,
        free,
        s3.S3Blobs(bucket),
        MultipartUploads(bucket, SystemClock().now),
        encrypts=settings.encrypt_data,
    )


def _sign_ins(
    settings: Settings, store: Store, sealer: Sealer, receipts: ReceiptSigner
) -> SignInServices:
    name = settings.public_url or "gpool"  # equal on every replica
    signing = TokenSigner(
        store,
        sealer,
        TokenAudience(issuer=name, audience=name),
        KeyRotation(span(settings.rotate_signing_keys_s), span(settings.signing_key_lead_s)),
    )
    return SignInServices(
        sealer,
        signing,
        receipts,
        Outbound(),
        RefreshTerms(
            grace=span(settings.grace_s),
            idle=span(settings.idle_days * DAY_S),
            life=span(settings.session_days * DAY_S),
        ),
        PasswordCost(settings.password_passes, settings.password_memory_kib),
    )


@asynccontextmanager
async def running(server: Server) -> AsyncIterator[Server]:
    runner = LoopRunner(
        server,
        *all_loops(server),
        MonitorPool(server),
        LagLoop(server),
        LogAuditAnchors(server),
    )
    runner.start()
    try:
        yield server
    finally:
        await runner.stop()
        for connection in server.nodes.connections:
            connection.refuse("unreachable", "the server is stopping; connect again", retry=True)
        await close_server(server)


async def close_server(server: Server) -> None:
    """Close an opened server whose loops do not run."""
    if isinstance(server.replica, Membership):
        await server.replica.stop()
    await server.events.close()
    await server.identity.close()
    await server.blobs.close()
    await server.store.close()


async def drain(app: FastAPI, server: Server) -> None:
    """Prepare the end of a server that others may replace: give up leading, send nodes elsewhere, serve what comes."""
    app.state.draining = True  # `/readyz` and the agents' channel answer 503
    if isinstance(server.replica, Membership):
        await server.replica.resign()
    app.state.departure = Departure(server, server.settings.drain_s)
    app.state.departure.begin()


def make_app(server: Server, tracing: Tracing | None = None) -> FastAPI:

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        async with running(server):
            app.state.ready = True
            yield
            app.state.ready = False
            if app.state.departure is not None:
                await app.state.departure.end()
            await app.state.readiness.close()

    app = FastAPI(
        title="gpool",
        version=VERSION,
        lifespan=lifespan,
        openapi_url=None,
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,
        telemetry=NO_TELEMETRY,
    )
    app.state.server = server
    app.state.readiness = Readiness(server.store)
    app.state.departure = None  # set by `drain`
    signals = server.metrics.signals.http
    routing.install(app, server.guard, server.admission, VERSION, signals, tracing)
    return app
