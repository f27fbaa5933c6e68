"""Runs the server: uvicorn on uvloop, one process."""

from __future__ import annotations

import asyncio
import ctypes
import os
import resource
import signal
import sys
from collections.abc import Awaitable, Callable, Iterator
from contextlib import suppress
from types import FrameType
from urllib.parse import unquote, urlsplit

import uvicorn
import uvloop
from fastapi import FastAPI
from pydantic import ValidationError

from gpool.core.errors import GpoolError
from gpool.observability.logs import LogSource, configure, exported_traces, fail, get_logger
from gpool.observability.redaction import Redactor
from gpool.observability.tracing import Tracing
from gpool.server.app import drain, make_app, open_server, private_directory
from gpool.server.http import LimitedConfig, LimitedServer
from gpool.server.metrics.listener import metrics_listener
from gpool.server.overload.connections import HttpLimits
from gpool.server.server import VERSION, Server
from gpool.server.settings import Settings
from gpool.server.store.drivers.opening import lock_for_serving
from gpool.wire.frames import MAX_FRAME_BYTES

log = get_logger(__name__)
SOURCE = LogSource("gpool-server", VERSION)

USAGE = 2
"""Exit code after an invalid setting: `gpool up` reports it instead of starting the server again."""

STOP_WITHIN_S = 3
KEEP_ALIVE_S = 75
"""Longer than our clients keep an idle connection (`transfer.senders.KEPT_IDLE_S`), so that the client closes it and
no request meets a connection the server is closing."""

OWN_DESCRIPTORS = 128
"""Descriptors for the store, artifacts and logs."""

Opened = Callable[[Server], Awaitable[None]]
Drain = Callable[[], Awaitable[None]]


class _Listener(LimitedServer):
    """Records the signal that stopped it: uvicorn raises it again, but the parent may have set it to be ignored.

    After SIGTERM it goes on for `drain_s`; a second signal, SIGINT, ends it at once.
    """

    signal = 0

    def __init__(self, config: uvicorn.Config, drain_s: float, drain: Drain) -> None:
        super().__init__(config)
        self._drain_s, self._drain = drain_s, drain
        self._ends_s: float | None = None  # end of the drain by the loop's clock

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        self.signal = sig
        super().handle_exit(sig, frame)

    async def on_tick(self, counter: int) -> bool:
        is_over = await super().on_tick(counter)
        if not is_over or self.signal != signal.SIGTERM or self.force_exit:
            return is_over
        now_s = asyncio.get_running_loop().time()
        if self._ends_s is None:
            self._ends_s = now_s + self._drain_s
            if self._drain_s:
                await self._drain()
        return now_s >= self._ends_s


async def serve(
    settings: Settings, opened: Opened | None = None, tracing: Tracing | None = None
) -> int:
    """Serve until SIGINT or SIGTERM and return the signal. `opened` is called before the first request.

    `Conflict` if another server has the lock of an SQLite store.
    """
    private_directory(settings.data)
    raise_descriptor_limit()
    async with lock_for_serving(settings.store_url):
        server = await open_server(settings)
        if opened is not None:
            await opened(server)
        app = make_app(server, tracing)
        config = configuration(server, app)
        listener = _Listener(config, settings.drain_s, lambda: drain(app, server))
        async with metrics_listener(server):
            await listener.serve()
    return listener.signal


def raise_descriptor_limit() -> None:
    """Raise this process's limit of open files to the hard limit, which the administrator set."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        with suppress(OSError, ValueError):  # e.g. unlimited, where the kernel has a maximum
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def http_limits(settings: Settings) -> HttpLimits:
    """Limits of connections. A quarter of the descriptors is reserved for channels of nodes that proved their key.

    TLS handshakes have an eighth more than `total`.
    """
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    descriptors = 1 << 20 if soft == resource.RLIM_INFINITY else soft
    return HttpLimits(
        per_network=settings.connections_per_network,
        total=max(16, (descriptors - OWN_DESCRIPTORS) * 2 // 3),
        head_s=settings.request_head_s,
        body_bytes_per_s=settings.request_bytes_per_s,
        proxies=settings.proxies,
    )


def configuration(server: Server, app: FastAPI | None = None) -> uvicorn.Config:
    shown = server.certificate
    return LimitedConfig(
        app or make_app(server),
        http_limits(server.settings),
        host=server.settings.host,
        port=server.settings.port,
        ws_max_size=MAX_FRAME_BYTES,
        ws_per_message_deflate=False,
        ws_ping_interval=None,  # heartbeats of the agents do that
        access_log=False,
        proxy_headers=bool(server.settings.proxies),
        forwarded_allow_ips=server.settings.proxies,  # from others X-Forwarded-* is ignored
        ssl_certfile=shown.file if shown is not None else None,
        ssl_keyfile=shown.key_file if shown is not None else None,
        log_config=None,
        lifespan="on",
        timeout_keep_alive=KEEP_ALIVE_S,
        timeout_graceful_shutdown=STOP_WITHIN_S,
    )


LARGE_BUFFER_BYTES = 1 << 20
_MMAP_THRESHOLD = -3  # M_MMAP_THRESHOLD of malloc.h


def return_large_buffers() -> None:
    """Give each freed buffer of `LARGE_BUFFER_BYTES` or more back to the system at once.

    By default glibc raises that size up to 32 MiB with every large buffer freed, and later ones stay in a heap that
    small objects keep from shrinking: after 2,000 bodies of 29 MB the server kept 120 MiB.
    """
    with suppress(AttributeError):  # another C library has no `mallopt`
        ctypes.CDLL(None).mallopt(_MMAP_THRESHOLD, LARGE_BUFFER_BYTES)


def secret_values(settings: Settings) -> Iterator[str]:
    """Secrets in the settings, which no log line may hold."""
    secrets = [settings.master_key, *(each.client_secret for each in settings.oidc)]
    yield from (each.get_secret_value() for each in secrets if each is not None)
    if settings.database_url and (password := urlsplit(settings.database_url).password):
        yield unquote(password)


def main() -> None:
    return_large_buffers()
    form = os.environ.get("GPOOL_SERVER_LOG_FORMAT", "text")  # of errors in the settings too
    try:
        settings = Settings()
        redactor = Redactor(secret_values(settings))
        configure(settings.log_format, settings.log_level, SOURCE, redactor)
        with (
            exported_traces(SOURCE, redactor) as tracing,
            asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner,
        ):
            stopped_by = runner.run(serve(settings, tracing=tracing))
    except KeyboardInterrupt:  # uvicorn stopped in order and raised the signal again
        stopped_by = signal.SIGINT
    except GpoolError as error:
        fail(form, SOURCE, error.detail)
        sys.exit(1)
    except ValidationError as error:
        found = ((".".join(map(str, one["loc"])), one["msg"]) for one in error.errors())
        wrong = "; ".join(f"GPOOL_SERVER_{name.upper()}: {text}" for name, text in found)
        fail(form, SOURCE, wrong)
        sys.exit(USAGE)
    if stopped_by:
        sys.exit(128 + stopped_by)
