"""A pool on this machine with its real GPU, for the scripts here: `gpool up`, users, tasks side by side. JSON lines."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
BEGAN = time.perf_counter()


def leave(*_: object) -> None:
    """End by an exception: a time limit then stops the pool, too."""
    raise SystemExit(143)


signal.signal(signal.SIGTERM, leave)


def say(**facts: object) -> None:
    text = json.dumps({"t": round(time.perf_counter() - BEGAN, 2), **facts}, default=str)
    print(text, flush=True)


def pause(seconds: float) -> None:
    threading.Event().wait(seconds)


def smi(*words: str) -> list[str]:
    done = subprocess.run(["nvidia-smi", *words], capture_output=True, text=True, check=False)
    return (done.stdout + done.stderr).strip().splitlines()


def wait_free(within_s: float = 30.0, tries: int = 5) -> bool:
    """Wait until no process computes on the first card in `tries` readings, a tenth of a second apart; False: too late."""
    import pynvml  # noqa: PLC0415 - the scripts that need no card go without

    pynvml.nvmlInit()
    card = pynvml.nvmlDeviceGetHandleByIndex(0)
    until, free = time.perf_counter() + within_s, 0
    while free < tries and time.perf_counter() < until:
        free = 0 if pynvml.nvmlDeviceGetComputeRunningProcesses(card) else free + 1
        pause(0.1)
    pynvml.nvmlShutdown()
    return free >= tries


@dataclass
class Ran:
    """How a command went. `doc` is the task's document, where it has one."""

    rc: int | str
    seconds: float
    out: list[str] = field(default_factory=list)
    err: list[str] = field(default_factory=list)

    @property
    def lines(self) -> list[dict[str, Any]]:
        found = []
        for line in self.out:
            with contextlib.suppress(ValueError):
                document = json.loads(line)
                if isinstance(document, dict):
                    found.append(document)
        return found

    def told(self, name: str) -> Any:
        return next((line[name] for line in self.lines if name in line), None)

    def brief(self) -> dict[str, object]:
        return {"rc": self.rc, "s": self.seconds, "out": self.out[-8:], "err": self.err[-8:]}


class Pool:
    def __init__(self, port: int, sharing: str) -> None:
        self.home = Path(tempfile.mkdtemp(prefix="gpool-gpu-"))
        self.port = port
        self.env = {
            **os.environ,
            "GPOOL_AGENT_SHARING": sharing,
            "GPOOL_PASSWORD": "a long password 4 all",
        }
        self._log = (self.home / "up.log").open("wb")
        self._up = subprocess.Popen(
            [
                sys.executable,
                "-m",
                "gpool",
                "up",
                "--port",
                str(port),
                "--data",
                str(self.home / "data"),
            ],
            env=self._env("owner"),
            stdout=self._log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )

    def _env(self, user: str) -> dict[str, str]:
        return {**self.env, "GPOOL_HOME": str(self.home / user)}

    def ready(self, within_s: float = 60) -> bool:
        until = time.perf_counter() + within_s
        while time.perf_counter() < until and self._up.poll() is None:
            if '"gpu"' in "".join(self.gpool("gpus", "--json").out):
                return True
            pause(0.3)
        return False

    def register(self, user: str) -> None:
        address = f"http://127.0.0.1:{self.port}"
        ran = self.gpool("--url", address, "register", user, user=user)
        if ran.rc != 0:
            say(register=user, **ran.brief())

    def gpool(self, *words: str, user: str = "owner", timeout: float = 60) -> Ran:
        with self.begun(*words, user=user) as begun:
            return begun(timeout)

    @contextlib.contextmanager
    def begun(self, *words: str, user: str = "owner") -> Iterator[Any]:
        began = time.perf_counter()
        child = subprocess.Popen(
            [sys.executable, "-m", "gpool", *words],
            env=self._env(user),
            cwd=HERE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

        def ended(timeout: float) -> Ran:
            try:
                out, err = child.communicate(timeout=timeout)
                rc: int | str = child.returncode
            except subprocess.TimeoutExpired:
                child.kill()
                out, err = child.communicate()
                rc = "timed out"
            took = round(time.perf_counter() - began, 2)
            return Ran(rc, took, out.splitlines(), err.splitlines())

        try:
            yield ended
        finally:
            if child.poll() is None:
                child.kill()
                child.wait()

    def said(self, count: int = 40) -> list[str]:
        """What agent, server and `up` said, each its last lines."""
        found = []
        for file in sorted(self.home.rglob("*.log")):
            lines = file.read_text(errors="replace").splitlines()[-count:]
            found += [f"{file.name}: {line}" for line in lines]
        return found

    def grep(self, *words: str) -> list[str]:
        return [x[:400] for x in self.said(4000) if any(word in x for word in words)]

    def ends(self) -> int:
        """Tenancies of cards that have ended so far, their memory overwritten."""
        return len(self.grep("tenancy_ended"))

    def wait_for_end(self, ends: int, within_s: float = 40.0) -> None:
        """Wait until more than `ends` tenancies have ended: until then a scrub takes all free memory of the card."""
        until = time.perf_counter() + within_s
        while self.ends() <= ends and time.perf_counter() < until:
            pause(0.1)
        wait_free(until - time.perf_counter())

    def stop(self) -> None:
        self._up.send_signal(signal.SIGINT)
        try:
            self._up.wait(40)
        except subprocess.TimeoutExpired:
            say(step="stop", failed="did not stop within 40 s", log=self.said(15))
            with contextlib.suppress(OSError):
                os.killpg(self._up.pid, signal.SIGKILL)
            self._up.wait(10)
        self._log.close()

    def remove(self) -> None:
        shutil.rmtree(self.home, ignore_errors=True)


@contextlib.contextmanager
def pool(port: int, sharing: str, *users: str) -> Iterator[Pool]:
    """Up, with its users; its log is shown when something goes wrong, the card's state at the end always."""
    made = Pool(port, sharing)
    try:
        if not made.ready():
            say(step="up", sharing=sharing, failed="not ready", log=made.said())
            raise RuntimeError("the pool did not come up")
        say(step="up", sharing=sharing, gpus=made.gpool("gpus", "--json").out[:40])
        for user in users:
            made.register(user)
        yield made
    except Exception:
        say(step="failed", sharing=sharing, log=made.said(60))
        raise
    finally:
        made.stop()
        say(
            step="down",
            sharing=sharing,
            log=made.grep("unclean", "gpu_", "card_", "tenancy", "rror")[-25:],
        )
        made.remove()


def card_state() -> dict[str, object]:
    asked = (
        "--query-gpu=mig.mode.current,compute_mode,power.limit,clocks.applications.gr,memory.used"
    )
    return {"card": smi(asked, "--format=csv,noheader"), "list": smi("-L")}


def set_back() -> None:
    """Whatever a failed step left on the card."""
    smi("mig", "-dci")
    smi("mig", "-dgi")
    smi("-mig", "0")
    smi("-c", "DEFAULT")
