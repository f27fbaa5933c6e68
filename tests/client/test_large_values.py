"""Values from other accounts' nodes beyond the default size: the caller's option, within twice the size in memory."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy
import pytest

import gpool
from gpool import Client
from gpool.agent.runner import encoding
from gpool.wire.values import MAX_VALUE_BYTES
from tests.client.hostile_values import peak_bytes
from tests.client.standin import Pool

LARGE_BYTES = MAX_VALUE_BYTES + (16 << 20)
MEASURED = """
import json, sys
from tests.client.test_large_values import received
print(json.dumps(received(sys.argv[1])))
"""


def pool_with_large_array() -> Pool:
    pool = Pool()
    pool.own_node = False
    array = numpy.zeros(LARGE_BYTES // 8)
    pool.forged = encoding.encode(array, lambda _: b"")
    return pool


def test_a_value_past_the_default_size_needs_the_callers_option() -> None:
    pool = pool_with_large_array()
    with Client("http://pool.test", "gpk_test", transport=pool) as client:
        run = client.task(lambda: 1).submit()
        with pytest.raises(gpool.TaskFailed) as caught:
            run.result()
        said = caught.value.detail
        assert "more than 64 MiB; return less per call" in said
        assert "GPOOL_MAX_VALUE" in said
        assert "gpool.Client(max_value='256MiB')" in said
        assert f"client.get({run.id!r}).result()" in said
    with Client("http://pool.test", "gpk_test", transport=pool, max_value="256MiB") as client:
        assert client.get(run.id).result().nbytes == LARGE_BYTES


def test_the_option_also_lowers_the_limit_of_small_values(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pool = Pool()
    monkeypatch.setenv("GPOOL_MAX_VALUE", "1KB")
    with Client("http://pool.test", "gpk_test", transport=pool) as client:
        assert client.task(lambda: "x" * 2000).remote() == "x" * 2000  # an own node's
        pool.own_node = False
        assert client.task(lambda: "x" * 900).remote() == "x" * 900
        for size in (2000, 100_000):
            with pytest.raises(gpool.TaskFailed, match="more than 1,000 bytes"):
                client.task(lambda size=size: "x" * size).remote()


def test_a_large_value_takes_twice_its_size_in_memory_and_one_past_the_limit_is_not_read() -> None:
    words = [sys.executable, "-c", MEASURED]
    for limit, error in (("100MiB", ""), ("70MiB", "TaskFailed")):
        done = subprocess.run([*words, limit], capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr[-2000:]
        found = json.loads(done.stdout)
        assert found["error"] == error
        assert found["bytes"] <= (0 if error else 2 * LARGE_BYTES) + (4 << 20)


def received(limit: str) -> dict[str, object]:
    """Growth of this process's peak while it reads the array; the bytes that the stand-in holds are there before."""
    pool, error = pool_with_large_array(), ""
    with Client("http://pool.test", "gpk_test", transport=pool, max_value=limit) as client:
        run = client.task(lambda: 1).submit()
        run.wait()
        Path("/proc/self/clear_refs").write_text("5")  # begins a new peak
        before = peak_bytes()
        try:
            run.result()
        except gpool.TaskFailed as failed:
            error = type(failed).__name__
        return {"bytes": peak_bytes() - before, "error": error}
