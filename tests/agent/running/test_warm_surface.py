"""An assigned warm sandbox against one that was started for its user: the same walls, the same view, nothing more."""

from __future__ import annotations

import json
import os
import re
import resource
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import cloudpickle
import pytest

from gpool.agent.runtime.protocol import RunnerJob
from gpool.agent.runtime.runner_calls import PYTHON
from tests.tools.runtimes import LIMITS, Caller, using

cloudpickle.register_pickle_by_value(sys.modules[__name__])
PROBE = Path(__file__).parents[2] / "hostile" / "probe"
ENV = (("WHO", "me"), ("PATH_TO", "x=y"))


def survey() -> dict[str, Any]:
    """Everything of the walls that can be seen from inside."""
    status = dict(
        line.split(":\t", 1)
        for line in Path("/proc/self/status").read_text().splitlines()
        if ":\t" in line
    )
    kept = ("Uid", "Gid", "Groups", "NoNewPrivs", "Seccomp", "Seccomp_filters", "Umask")
    capabilities = ("CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb")
    mounts = [line.split(" ") for line in Path("/proc/self/mountinfo").read_text().splitlines()]
    own = Path("/proc/self/fd")
    links = [os.readlink(own / name) for name in os.listdir(own) if (own / name).is_symlink()]
    return {
        "status": {name: status.get(name) for name in (*kept, *capabilities)},
        "mounts": sorted(
            (words[4], words[5], words[words.index("-") + 1], words[-1]) for words in mounts
        ),
        "limits": {
            name: resource.getrlimit(getattr(resource, name))
            for name in dir(resource)
            if name.startswith("RLIMIT_")
        },
        "variables": dict(os.environ),
        "at": (os.getcwd(), sys.argv, os.listdir("/work"), os.listdir("/tmp")),
        "holds": sorted({re.sub(r"\[\d+\]|/proc/\d+", "", link).strip() for link in links}),
        "processes": len([name for name in os.listdir("/proc") if name.isdecimal()]),
    }


def attack(sources: dict[str, str]) -> dict[str, str]:
    """Every attack of the hostile suite that needs nothing planted; what became of each."""
    for name, text in sources.items():
        Path(name).write_text(text)
    Path("planted").write_text("{}")
    ran = subprocess.run(
        [sys.executable, "main.py", "planted"], capture_output=True, close_fds=False, check=True
    )
    told = [json.loads(line) for line in ran.stdout.splitlines()]
    return {one["name"]: one["became"] for one in told if "name" in one}


async def seen_by(runner: Any) -> tuple[dict[str, Any], dict[str, str]]:
    calling = Caller(runner)
    sources = {file.name: file.read_text() for file in PROBE.glob("*.py")}
    found = []
    try:
        for function, arguments in (
            (survey, ()),
            (attack, (sources,)),
        ):
            answer = await calling.call(function, *arguments)  # type: ignore[arg-type]
            assert not answer.raised, answer.error_text
            found.append(cloudpickle.loads(answer.value))
    finally:
        await runner.remove()
    return found[0], found[1]


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Any]:
    """What is seen and refused in (a sandbox started for its user, a warm one that was assigned)."""
    base = tmp_path_factory.mktemp("surface")

    async def work(runtime: Any) -> tuple[Any, Any]:
        job = RunnerJob(PYTHON, ENV, (), LIMITS)
        fresh = await seen_by(await runtime.start_runner(job))
        early = replace(job, preload=("wave",))
        warm = await runtime.warm_runner(early, replace(LIMITS, cpu_milli=500))
        await warm.assign(ENV)
        return fresh, await seen_by(warm)

    return using("bubblewrap", base / "data", work)


def test_the_walls_look_the_same_from_inside(both: tuple[Any, Any]) -> None:
    (fresh, _), (warm, _) = both
    for what in ("status", "mounts", "limits", "variables", "at"):
        assert warm[what] == fresh[what], what


def test_it_holds_nothing_but_pipes_and_has_one_process_more(both: tuple[Any, Any]) -> None:
    (fresh, _), (warm, _) = both
    assert set(warm["holds"]) <= {*fresh["holds"], "pipe:", "socket:"}
    assert warm["processes"] == fresh["processes"] + 1, "the warmed parent"


def test_every_attack_ends_as_it_does_in_a_fresh_one(both: tuple[Any, Any]) -> None:
    """What must not get through is judged by the hostile suite; here the two must not differ."""
    (_, fresh), (_, warm) = both
    assert len(warm) > 100
    assert warm == fresh
