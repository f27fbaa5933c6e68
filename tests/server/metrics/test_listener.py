"""The listener for metrics alone, on real sockets. Against a running pool: tests/e2e/test_prometheus.py."""

from __future__ import annotations

from dataclasses import replace

import httpx2
import pytest
from pydantic import ValidationError

from gpool.core.errors import Invalid
from gpool.server.metrics.listener import metrics_listener
from gpool.server.server import Server
from gpool.server.settings import Settings
from tests.server.server_desk import Desk
from tests.tools.processes import PATIENCE_S, free_port

pytestmark = pytest.mark.anyio


def listening_on(desk: Desk, address: str) -> Server:
    return replace(
        desk.server, settings=Settings(data=desk.server.settings.data, metrics_listen=address)
    )


async def test_it_serves_until_the_server_stops(desk: Desk) -> None:
    address = f"127.0.0.1:{free_port()}"
    async with httpx2.AsyncClient(trust_env=False, timeout=PATIENCE_S) as http:
        async with metrics_listener(listening_on(desk, address)):
            page = await http.get(f"http://{address}/metrics")
            assert page.status_code == 200
            assert "gpool_leader 1.0" in page.text
            assert (await http.get(f"http://{address}/healthz")).status_code == 404
        with pytest.raises(httpx2.TransportError):
            await http.get(f"http://{address}/metrics")


async def test_an_address_in_use_is_refused_with_its_name(desk: Desk) -> None:
    address = f"127.0.0.1:{free_port()}"
    async with metrics_listener(listening_on(desk, address)):
        with pytest.raises(Invalid, match=f"metrics_listen={address}: cannot listen there"):
            async with metrics_listener(listening_on(desk, address)):
                pass


@pytest.mark.parametrize("address", ["9464", "localhost", "a:b", ":9464", "::1:9464"])
def test_an_address_without_host_or_port_is_refused(address: str) -> None:
    with pytest.raises(ValidationError, match="metrics_listen"):
        Settings(metrics_listen=address)
