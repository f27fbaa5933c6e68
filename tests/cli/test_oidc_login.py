"""`gpool login --oidc`: a real provider, a real server, and a browser that returns to the port of the command."""

from __future__ import annotations

import json
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import httpx2
import pytest

from gpool.core.errors import NotSignedIn
from gpool.transfer.loopback import LoopbackReceiver
from tests.tools.oidc_provider import oidc_provider
from tests.tools.processes import PATIENCE_S, Pool

CONSENT = """import sys, httpx2
answer = httpx2.post(sys.argv[1], data={"sub": "ada", "action": "authorize"}, timeout=60)
answer = httpx2.get(answer.headers["location"], timeout=60)
"""


def test_a_command_signs_in_with_a_provider(tmp_path: Path) -> None:
    script = tmp_path / "consent.py"
    script.write_text(CONSENT)
    with oidc_provider() as issuer:
        known = {"name": "mock", "issuer": issuer, "client_id": "gpool", "client_secret": "hush"}
        settings = {
            "GPOOL_SERVER_OIDC": json.dumps([known]),
            "BROWSER": f"{sys.executable} {script} %s",
        }
        pool = Pool(tmp_path / "pool", settings)
        try:
            pool.start(agents=())
            me = pool.json("login", "--oidc", "--json")
        finally:
            pool.stop()
    assert me["name"].startswith("mock-")
    assert me["identities"] == [issuer]


def in_background(work: Callable[[], object]) -> threading.Thread:
    thread = threading.Thread(target=work)
    thread.start()
    return thread


def test_only_the_redirect_with_the_expected_state_is_accepted() -> None:
    statuses: list[int] = []

    def redirects(url: str) -> None:
        for query in ("?code=evil&state=another", "?code=evil", "?code=right&state=expected"):
            statuses.append(httpx2.get(url + query, timeout=PATIENCE_S).status_code)

    with LoopbackReceiver() as receiver:
        thread = in_background(lambda: redirects(receiver.url))
        assert receiver.code("expected", PATIENCE_S) == "right"
        thread.join()
    assert statuses == [400, 400, 200]


def test_a_refusal_of_the_provider_and_a_missing_answer_end_the_command() -> None:
    with LoopbackReceiver() as receiver:
        url = f"{receiver.url}?error=access_denied&state=expected"
        thread = in_background(lambda: httpx2.get(url, timeout=PATIENCE_S))
        with pytest.raises(NotSignedIn, match="access_denied"):
            receiver.code("expected", PATIENCE_S)
        thread.join()
    with LoopbackReceiver() as receiver, pytest.raises(NotSignedIn, match="no sign-in within"):
        receiver.code("expected", 0)
