"""Wiring: builds `Server` from settings, and the FastAPI application around it."""

from __future__ import annotations

import os
import secrets
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from importlib import import_module
from pathlib import Path
from typing import Any

from fastapi import FastAPI

from gpool.core.errors import Invalid
from gpool.core.ids import UserId
from gpool.core.model import Permission
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
from gpool.server.identity import authorization
from gpool.server.identity.access_tokens import TokenAudience
from gpool.server.identity.authorization import Credentials
from gpool.server.identity.certificates import certificate_of
from gpool.server.identity.envelope import FieldLocation
from gpool.server.identity.node_proofs import NodeAuthenticator
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
from gpool.server.replicas.membership import Membership, Replica, SoleServer, is_replicated
from gpool.server.scheduling.loops import LoopRunner, all_loops
from gpool.server.scheduling.picture import StatePicture
from gpool.server.scheduling.policy import ActivePolicy, known_orders
from gpool.server.scheduling.scheduler import Scheduler
from gpool.server.server import VERSION, Server, SignInServices
from gpool.server.settings import Settings, span
from gpool.server.store.drivers.opening import open_store
from gpool.server.store.operations.identity import sealed_fields
from gpool.server.store.operations.identity import users as people
from gpool.server.store.operations.tasks import storage
from gpool.server.store.protocol import Store
from gpool.server.store.values import User
from gpool.server.wakeups import Hub

OPERATOR = "operator"
OPERATOR_KEY_FILE = "operator.key"
ROOT_KEY_FILE = "server.key"
OWN_FILES = (ROOT_KEY_FILE, "up.lock")  # besides the database
DAY_S = 86_400
_ROOT_KEY = FieldLocation("server_secrets", "root", "sealed")
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
        server = wire(settings, await open_store(settings.store_url), clock)
        await _remove_interrupted(server)
    if server.blobs.multipart is not None:
        await server.blobs.multipart.probe()
    await quotas.refresh(server)
    await operating.refresh(server)
    await server.identity.signing.ready(server.now)
    await server.picture.rebuild(server.now)
    await ensure_operator(server)
    return server


async def _open_replica(settings: Settings, clock: Clock) -> Server:
    """Register this server beside others of its database, and try to lead."""
    membership = Membership(
        settings.store_url,
        system_ids(clock).next(),
        settings.origin,
        VERSION,
        span(settings.replica_timeout_s),
    )
    store = await membership.open_store()
    root_key = await _shared_root_key(settings, store, clock)
    server = wire(settings, store, clock, membership, root_key)

    def turned() -> None:
        server.nodes.elsewhere.forget_heartbeats()
        server.picture.invalidate()
        membership.wake.call()

    await membership.start(turned)
    if not await membership.others_running():
        await _remove_interrupted(server)
    return server


async def _remove_interrupted(server: Server) -> None:
    """Remove temporary files and reserved uploads of an earlier process. No other server may run: they could be its."""
    server.blobs.remove_temporary()
    await server.store.write(storage.forget_interrupted())


async def _shared_root_key(settings: Settings, store: Store, clock: Clock) -> bytes:
    """Root key of the pool, encrypted in the store. The first replica stores that of its data directory."""
    sealer, place = Sealer(store, settings.master_source, clock.now), _ROOT_KEY
    if await store.read(sealed_fields.server_secret(place.row)) is None:
        sealed = await sealer.seal(place, _root_key(settings.data))
        await store.write(sealed_fields.put_server_secret(place.row, sealed))
    found = await store.read(sealed_fields.server_secret(place.row))
    assert found is not None, "it has just been stored"
    return await sealer.open(place, found)


def wire(
    settings: Settings,
    store: Store,
    clock: Clock,
    membership: Membership | None = None,
    root_key: bytes | None = None,
) -> Server:
    """Build the server. `root_key`: shared by replicas; without it the one of the data directory."""
    hub, metrics = Hub(), Metrics()
    if root_key is None:
        root_key = _root_key(settings.data)
    store = MeasuredStore(store, metrics.signals.store)
    remember = span(settings.key_cache_s)
    sealer = Sealer(store, settings.master_source, clock.now)
    sign_ins = _sign_ins(settings, store, sealer)
    policy, orders = Policy(order=settings.order), known_orders()
    order_named(policy.order, orders)  # Invalid for an unknown order, before anything is served
    elapsed = clock.passed if isinstance(clock, MonotonicClock) else None
    registry = NodeRegistry(metrics, settings.ttl, elapsed)
    replica: Replica = SoleServer() if membership is None else membership

    def leads() -> bool:
        return replica.leads

    picture = StatePicture(
        store,
        registry,
        ActivePolicy(policy, orders),
        hub,
        metrics,
        clock.now,
        leads,
    )
    telemetry, monitor = Telemetry(), PoolMonitor()
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
    )
    metrics.add(*collectors(observed))
    return Server(
        settings=settings,
        store=store,
        clock=clock,
        ids=system_ids(clock, None if membership is None else lambda: membership.slot),
        hub=hub,
        nodes=registry,
        picture=picture,
        scheduler=Scheduler(picture, sealer, metrics),
        reports=ReportBatches(picture.write, picture.absorb, settings.storage_limits),
        blobs=_blobs(settings),
        credentials=Credentials(store, clock.now, remember, root_key, sign_ins.signing),
        gate=NodeAuthenticator(
            store, clock.now, root_key, remember=remember, is_shared=membership is not None
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
        paces=FrameBudgets(settings.node_frames_per_s),
        replica=replica,
    )


def _blobs(settings: Settings) -> Blobs:
    folder, bucket = settings.data / "artifacts", settings.bucket
    most, free = settings.max_artifact_bytes, settings.min_free_bytes
    if bucket is None:
        return Blobs(folder, most, free)
    try:
        s3 = import_module("gpool.server.blobs.s3")
    except ImportError as error:
        raise Invalid("artifacts in S3 need a package: pip install 'gpool[s3]'") from error
    # the store compares the signature's time with the time of day, not with a simulated clock
    return Blobs(
        folder, most, free, s3.S3Blobs(bucket), MultipartUploads(bucket, SystemClock().now)
    )


def _sign_ins(settings: Settings, store: Store, sealer: Sealer) -> SignInServices:
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
    runner = LoopRunner(server, *all_loops(server), MonitorPool(server), LagLoop(server))
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
    await server.identity.close()
    await server.blobs.close()
    await server.store.close()


async def drain(app: FastAPI, server: Server) -> None:
    """Prepare the end of a server that others may replace: give up leading, send nodes elsewhere, serve what comes."""
    app.state.draining = True  # `/readyz` and the agents' channel answer 503
    if isinstance(server.replica, Membership):
        await server.replica.resign()
    for connection in server.nodes.connections:
        connection.refuse("unreachable", "the server is stopping; connect again", retry=True)


def make_app(server: Server, tracing: Tracing | None = None) -> FastAPI:

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        async with running(server):
            app.state.ready = True
            yield
            app.state.ready = False
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
    routing.install(app, server.guard, VERSION, server.metrics.signals.http, tracing)
    return app


# ---- first start


async def ensure_operator(server: Server) -> str:
    """Return the operator's API key from its file (mode 0600); create account and key if missing."""
    path = server.settings.data / OPERATOR_KEY_FILE
    user = await server.store.read(people.user_by_name(OPERATOR))
    if user is None:
        user = User(UserId(server.ids.next()), OPERATOR, frozenset(Permission), server.now)
        await server.store.write(people.create_user(user))
    key = _secret_in(path)
    if key is not None and await server.credentials.who(key) is not None:
        return key
    key = authorization.fresh(authorization.USER_PREFIX)
    await server.store.write(
        people.add_key(
            server.ids.next(), user.id, "first start", authorization.hashed(key), server.now
        )
    )
    _write_secret(path, key)
    return key


def _secret_in(path: Path) -> str | None:
    try:
        return path.read_text().strip() or None
    except FileNotFoundError:
        return None


def _write_secret(path: Path, secret: str) -> None:
    temporary = path.with_suffix(".new")
    temporary.unlink(missing_ok=True)
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    with os.fdopen(descriptor, "w") as file:
        file.write(secret + "\n")
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)


def _root_key(data: Path) -> bytes:
    path = data / ROOT_KEY_FILE
    found = _secret_in(path)
    if found is None:
        found = secrets.token_hex(32)
        _write_secret(path, found)
    return bytes.fromhex(found)
