"""Hostile outputs through the real collector of a runtime: what became of each, and how long it took."""

from __future__ import annotations

import asyncio
import contextlib
import glob
import hashlib
import json
import os
import select
import shutil
import signal
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from gpool.agent.runtime.protocol import BadOutput, CommandJob, SandboxLimits, StagedInput
from gpool.core.model import EndReason
from tests.hostile.probe import litter

PROBE = Path(__file__).with_name("probe")
LIMITS = SandboxLimits(cpu_milli=2000, memory_bytes=512 << 20, disk_bytes=128 << 20, processes=256)
GIVE_UP_AFTER_S = 240.0
MOST_TEXT = 700
ROUNDS = 8
MORE_ROUNDS = 25
"""Times the rounds are repeated at most until a race of `SEEN_REFUSED` was refused once."""
SEEN_REFUSED = ("file and fifo", "folder and link")


def staged() -> list[StagedInput]:
    return [StagedInput(f"probe/{file.name}", file, False) for file in sorted(PROBE.glob("*.py"))]


@dataclass(frozen=True, slots=True)
class Took:
    """`became`: refused, taken, or broken when it was neither; `wrong` says what must not be."""

    name: str
    became: str
    text: str
    took_s: float
    wrong: str = ""


def wrong_text(text: str, hidden: Sequence[str]) -> str:
    if not text or len(text) > MOST_TEXT:
        return "its text is empty or too long"
    if not text.isprintable():
        return "its text holds what a terminal obeys"
    return next((f"its text tells {word}" for word in hidden if word in text), "")


def wrong_files(into: Path, found: Sequence[Any], secret: bytes) -> str:
    names = {entry.name for entry in os.scandir(into)}
    if names != {one.sha256 for one in found}:
        return f"{len(names)} files lie there for {len(found)} outputs"
    for one in found:
        data = (into / one.sha256).read_bytes()
        if secret in data or b"root:x:0:" in data or b"root:*:" in data:
            return "it holds the host's bytes"
        if hashlib.sha256(data).hexdigest() != one.sha256 or len(data) != one.size_bytes:
            return "it is not what it is said to be"
    return ""


async def take(
    sandbox: Any, name: str, wanted: str, into: Path, secret: bytes, hidden: Sequence[str]
) -> Took:
    os.mkdir(into, 0o700)
    began = time.monotonic()
    became, text, wrong = "", "", ""
    try:
        async with asyncio.timeout(GIVE_UP_AFTER_S):
            found = await sandbox.collect([wanted], into)
        became, text = "taken", f"{len(found)} files"
        wrong = wrong_files(into, found, secret)
    except BadOutput as refused:
        became, text = "refused", str(refused)
        wrong = wrong_text(text, hidden)
        if any("collecting-" in entry.name for entry in os.scandir(into)):
            wrong = wrong or "half a file was left"
    except Exception as broken:  # noqa: BLE001 - whatever comes out is what the test is about
        became = "broken"
        wrong = text = f"{type(broken).__name__}: {broken}"[:300]
    took = time.monotonic() - began
    shutil.rmtree(into)
    return Took(name, became, text, took, wrong)


def sleeps(pid: int) -> bool:
    """Whether a process waits for something that need not come."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "S"


def naive(path: str, secret: bytes) -> str:
    """What a collector without any of it meets: "host" bytes, "blocked", "endless" or "" for nothing bad."""
    heard, told = os.pipe()
    child = os.fork()
    if child == 0:
        os.write(told, b"-")
        with contextlib.suppress(OSError), open(path, "rb") as file:
            data = file.read(1 << 16)
            found = secret in data or b"root:" in data
            os.write(
                told,
                b"host"
                if found
                else b"endless"
                if len(data) == 1 << 16 and not any(data)
                else b"-",
            )
        os._exit(0)
    os.close(told)
    os.read(heard, 1)  # it has begun
    while not (ready := select.select([heard], [], [], 0.5)[0]) and not sleeps(child):
        pass  # it had no turn yet, or waits for the disk
    said = os.read(heard, 16).decode() if ready else "blocked"
    os.close(heard)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return said.strip("-")


async def left(
    runtime: Any, base: Path, known: dict[str, Any], work: Path | None, group: str
) -> dict[str, Any]:
    """What a task that has ended left behind; with the first group, what consumers may ask for."""
    secret, hidden = known["secret"].encode(), [str(base)]
    word = json.dumps({"secret": known["files"]["key"], "group": group})
    argv = ("python", "probe/litter.py", "leave", word)
    sandbox = await runtime.start_command(CommandJob(argv, (), tuple(staged()), (), LIMITS))
    cases = [(n, *case) for n, case in enumerate(litter.LEFT.items()) if case[1].group == group]
    took: list[Took] = []
    controls: dict[str, str] = {}
    try:
        printed = b"".join([data async for _, data in sandbox.output()])
        ended = await sandbox.ended()
        if group and ended.reason is EndReason.BAD_OUTPUT:
            return {
                "took": [asdict(Took(name, "refused", ended.detail, 0)) for _, name, _ in cases]
            }
        assert ended.exit_code == 0, (ended, printed[-2000:])
        if work is not None:
            (place,) = glob.glob(f"{work}/*/*/o")
            for number, name, case in cases:
                controls[name] = naive(f"{place}/{number}/{case.wanted.rstrip('/')}", secret)
        for number, name, case in cases:
            wanted = f"o/{number}/{case.wanted}"
            took.append(await take(sandbox, name, wanted, base / "into", secret, hidden))
        for name, (wanted, _) in litter.ASKED.items() if not group else ():
            took.append(
                await take(sandbox, f"ask for {name}", wanted, base / "into", secret, hidden)
            )
    finally:
        await sandbox.remove()
    made = json.loads(printed[printed.index(b"{") :])
    return {"took": [asdict(one) for one in took], "not_made": made, "controls": controls}


async def changing(
    runtime: Any, base: Path, known: dict[str, Any], rounds: int = ROUNDS
) -> list[dict[str, Any]]:
    """What a task changes while it is taken: a checkpoint of a running task."""
    secret, hidden = known["secret"].encode(), [str(base)]
    word = json.dumps({"secret": known["files"]["key"]})
    argv = ("python", "probe/litter.py", "change", word)
    sandbox = await runtime.start_command(CommandJob(argv, (), tuple(staged()), (), LIMITS))
    took: list[Took] = []
    try:
        async for _, data in sandbox.output():
            if b"changing" in data:
                break
        cases = [
            (f"{n}{what}", name) for n, (name, (_, _, what)) in enumerate(litter.CHANGING.items())
        ]
        for wanted, name in [("lease/out", "file under a lease"), *cases]:
            least = 1 if name == "file under a lease" else rounds
            most = least * (MORE_ROUNDS if name in SEEN_REFUSED else 1)
            refused = False
            for done in range(most):
                if done >= least and refused:
                    break
                one = await take(sandbox, name, f"r/{wanted}", base / "into", secret, hidden)
                refused = refused or one.became == "refused"
                took.append(one)
    finally:
        await sandbox.kill()
        await sandbox.remove()
    return [asdict(one) for one in took]
