"""oidc-provider-mock (Authlib): a real OpenID Connect issuer, as a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import httpx2
import pytest

from tests.tools.processes import PATIENCE_S, eventually, free_port

PYTHON = os.environ.get("GPOOL_OIDC_PYTHON", sys.executable)


@contextmanager
def oidc_provider() -> Iterator[str]:
    """Issuer URL of a running provider; skips where it is not installed, fails in CI."""
    there = subprocess.run(
        [PYTHON, "-W", "ignore", "-c", "import oidc_provider_mock"],
        capture_output=True,
        check=False,
    )
    if there.returncode:
        if os.environ.get("CI"):
            pytest.fail("oidc-provider-mock is not installed")
        pytest.skip("oidc-provider-mock is not installed")
    port = free_port()
    process = subprocess.Popen(
        [PYTHON, "-W", "ignore", "-m", "oidc_provider_mock", "--port", str(port)],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    url = f"http://127.0.0.1:{port}"

    def answers() -> bool:
        assert process.poll() is None, "the provider ended"
        try:
            return httpx2.get(f"{url}/.well-known/openid-configuration", timeout=20).is_success
        except httpx2.HTTPError:
            return False

    try:
        eventually("the provider answers", answers, PATIENCE_S, every_s=0.1)
        yield url
    finally:
        process.terminate()
        process.wait()
