"""The first things a new user does, with the commands a new user types."""

from __future__ import annotations

import hashlib
import os
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path

from gpool.testing.processes import GPOOL, Pool, eventually, free_port

MIB = 1024 * 1024
HUNDRED_MB = """
import hashlib, random
stream, digest = random.Random(7), hashlib.sha256()
with open("big.bin", "wb") as out:
    for _ in range(100):
        block = stream.randbytes(1_000_000)
        out.write(block)
        digest.update(block)
print(digest.hexdigest())
"""


def sha256_of(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def test_up_starts_a_pool_that_computes_42_and_stops_on_ctrl_c(
    tmp_path: Path, require: Callable[[str], None]
) -> None:
    require("bubblewrap")
    port, log = free_port(), tmp_path / "up.log"
    environment = {k: v for k, v in os.environ.items() if not k.startswith("GPOOL_")}
    environment |= {"HOME": str(tmp_path), "GPOOL_HOME": str(tmp_path / "home")}
    argv = [*GPOOL, "up", "--data", str(tmp_path / "data"), "--port", str(port)]
    with log.open("wb") as out:
        up = subprocess.Popen(argv, env=environment, stdout=out, stderr=out, start_new_session=True)
    try:
        eventually("gpool up says how to join", lambda: b"gpool://" in log.read_bytes(), 30)
        first = subprocess.run(
            [*GPOOL, "run", "--", "python", "-c", "print(6*7)"],
            env=environment,
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        assert (first.returncode, first.stdout) == (0, "42\n"), first.stderr + log.read_text()
        up.send_signal(signal.SIGINT)
        assert up.wait(15) in (0, 130)
    finally:
        up.kill()
        up.wait()


def test_run_prints_what_the_task_prints(pool: Pool) -> None:
    done = pool.gpool("run", "--", "python", "-c", "print(6*7)")
    assert (done.returncode, done.stdout) == (0, "42\n"), done.stderr


def test_run_exits_with_the_tasks_own_code(pool: Pool) -> None:
    assert pool.gpool("run", "--", "sh", "-c", "exit 7").returncode == 7


def test_a_function_gives_its_value_and_raises_its_exception(pool: Pool) -> None:
    lines = list(
        pool.program(
            "import gpool\n"
            "@gpool.task\n"
            "def half(n):\n"
            "    if n % 2: raise ValueError(f'{n} is odd')\n"
            "    return n // 2\n"
            "print(half.remote(84), list(half.map([2, 4, 6])))\n"
            "try: half.remote(3)\n"
            "except ValueError as error: print('raised', error)\n"
        )
    )
    assert lines[0] == "42 [1, 2, 3]"
    assert lines[1].startswith("raised 3 is odd")


def test_a_100_mb_output_comes_back_intact_with_flat_memory(pool: Pool, tmp_path: Path) -> None:
    """Neither server nor agent may hold the file: their peaks grow by less than a third of it."""
    assert pool.gpool("run", "--", "true").returncode == 0  # everything is imported and warm
    agent = pool.agents["first"]
    server_before, agent_before = pool.server.peak_memory_bytes(), agent.peak_memory_bytes()

    task = pool.submit("python", "-c", HUNDRED_MB, outputs=["big.bin"])
    assert pool.gpool("wait", task, timeout_s=120).returncode == 0
    fetched = tmp_path / "fetched"
    assert pool.gpool("result", task, "-o", str(fetched), timeout_s=120).returncode == 0

    [file] = fetched.rglob("big.bin")
    assert file.stat().st_size == 100_000_000
    assert pool.gpool("logs", task).stdout.strip() == sha256_of(file)
    assert pool.server.peak_memory_bytes() - server_before < 32 * MIB
    assert agent.peak_memory_bytes() - agent_before < 32 * MIB


def test_a_second_machine_joined_by_its_link_does_the_same(pool: Pool, tmp_path: Path) -> None:
    pool.join("second")
    assert pool.gpool("node", "pause", "first").returncode == 0
    task = pool.submit(
        "python", "-c", "print(6*7); open('o', 'w').write('x' * 1000)", outputs=["o"]
    )
    assert pool.gpool("wait", task).returncode == 0
    assert pool.gpool("logs", task).stdout == "42\n"
    assert pool.status(task)["node_name"] == "second"
    assert pool.gpool("result", task, "-o", str(tmp_path / "got")).returncode == 0
    assert next((tmp_path / "got").rglob("o")).read_text() == "x" * 1000
