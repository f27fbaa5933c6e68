"""Builds in a real sandbox, from an index made here: what comes out, what its scripts can reach, what it says when it fails."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import stat
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from gpool.agent.environments import BuildFailed, Environments, Indexes, UvBuilder, find_uv
from gpool.agent.environments.fetch_sources import FETCHED, UNREACHABLE
from gpool.agent.environments.interpreters import (
    Interpreter,
    candidates,
    find_interpreters,
    own_interpreter,
)
from gpool.agent.runtime.bubblewrap.runtime import BubblewrapRuntime
from gpool.agent.runtime.protocol import (
    ENVIRONMENT_AT,
    CommandJob,
    PreparedEnvironment,
    SandboxExit,
    SandboxFailed,
    SandboxLimits,
    SandboxNetwork,
)
from gpool.core.model import EndReason, OutputFile, Recipe
from gpool.core.specs.fields import environment_name, recipe
from tests.tools import unprivileged
from tests.tools.packages import PackageIndex
from tests.tools.runtimes import LIMITS, left_over, within

OWN = own_interpreter()
LANE = SandboxNetwork((), "127.0.0.53")


def silent(_line: str) -> None:
    return


@pytest.fixture
def index(tmp_path: Path, require: Callable[[str], None]) -> PackageIndex:
    require("bubblewrap")
    require("uv")
    return PackageIndex(tmp_path / "index")


@asynccontextmanager
async def node(
    data: Path, indexes: Indexes, interpreters: dict[str, Interpreter] | None = None
) -> AsyncIterator[tuple[Environments, BubblewrapRuntime]]:
    runtime = BubblewrapRuntime(data)
    await runtime.sweep()
    uv = find_uv()
    assert uv is not None
    environments = Environments(
        data / "environments",
        UvBuilder(runtime, data / "environments", uv, indexes),
        interpreters=interpreters or {OWN.minor: OWN},
        own=OWN.minor,
        clock=lambda: 0,
    )
    await environments.sweep()
    try:
        yield environments, runtime
    finally:
        await environments.close()
        await runtime.close()
        assert left_over(data) == []
        assert list((data / "environments" / "building").iterdir()) == []


async def said(runtime: BubblewrapRuntime, prepared: PreparedEnvironment | None, *argv: str) -> str:
    job = CommandJob(argv, (), (), (), LIMITS, environment=prepared)
    sandbox = await runtime.start_command(job)
    text = b"".join([data async for _, data in sandbox.output()])
    await sandbox.remove()
    return text.decode()


def only(index: PackageIndex) -> Indexes:
    return Indexes(default=index.address)


def test_packages_are_installed_compiled_and_sealed(index: PackageIndex, tmp_path: Path) -> None:
    index.wheel("inner", "2.5")
    index.wheel(
        "outer",
        needs=("inner>=2",),
        script="outer = outer:main",
        modules={
            "outer.py": "import inner, sys\ndef main(): print('outer runs', inner.VERSION, sys.prefix)\n"
        },
    )
    wanted = recipe(packages=("outer",))
    lines: list[str] = []

    async def story() -> None:
        async with node(tmp_path / "data", only(index)) as (environments, runtime):
            kept = environments.prepare(environment_name(wanted), wanted, lines.append, LIMITS)
            async with kept as prepared:
                assert prepared is not None
                script = await said(runtime, prepared, "outer")
                code = (
                    "import inner, outer; print(inner.__cached__, outer.main.__code__.co_filename)"
                )
                where = await said(runtime, prepared, "python", "-c", code)
                held = await said(
                    runtime,
                    prepared,
                    "touch",
                    f"{ENVIRONMENT_AT}/lib/python{OWN.minor}/site-packages/x",
                )
                for path in [prepared.root, *prepared.root.rglob("*")]:
                    facts = path.lstat()
                    assert facts.st_uid == os.geteuid()
                    if not stat.S_ISLNK(facts.st_mode):
                        assert not facts.st_mode & (0o022 | stat.S_ISUID | stat.S_ISGID), path
                manifest = environments.manifest(environment_name(wanted), wanted)
        site = f"{ENVIRONMENT_AT}/lib/python{OWN.minor}/site-packages"
        assert script == f"outer runs 2.5 {ENVIRONMENT_AT}\n"
        cached = f"{site}/__pycache__/inner.cpython-{OWN.minor.replace('.', '')}.pyc"
        assert where == f"{cached} {site}/outer.py\n"
        assert "Read-only file system" in held
        assert manifest is not None
        assert manifest.chosen == ("inner==2.5", "outer==1.0")
        assert lines[-1] == f"environment of Python {OWN.minor} with inner==2.5 outer==1.0"

    within(story())


def test_every_other_python_of_this_machine_can_have_an_environment(
    index: PackageIndex, tmp_path: Path
) -> None:
    index.wheel("thing")
    found = find_interpreters(candidates(os.environ, Path.home()))
    others = sorted(set(found) - {OWN.minor})
    if not others:
        pytest.skip("there is one Python here")

    async def story() -> None:
        async with node(tmp_path / "data", only(index), found) as (environments, runtime):
            for minor in others[:2]:
                for packages in ((), ("thing",)):
                    wanted = recipe(minor, packages)
                    async with environments.prepare(
                        environment_name(wanted), wanted, silent, LIMITS
                    ) as prepared:
                        code = "import sys; print('%d.%d' % sys.version_info[:2], sys.prefix)"
                        told = await said(runtime, prepared, "python", "-c", code)
                        assert told == f"{minor} {ENVIRONMENT_AT}\n"
                        if packages:
                            code = "import thing; print(thing.VERSION)"
                            assert await said(runtime, prepared, "python", "-c", code) == "1.0\n"

    within(story())


@pytest.mark.parametrize(
    ("packages", "says"),
    [
        (("nowhere",), "nowhere"),
        (("thing>=7",), r"thing"),
        (("broken",), "the backend's own words"),
    ],
)
def test_a_recipe_that_cannot_be_built_says_why(
    index: PackageIndex, tmp_path: Path, packages: tuple[str, ...], says: str
) -> None:
    index.wheel("thing")
    index.sdist("broken", 'raise RuntimeError("the backend\'s own words")\n')
    wanted = recipe(packages=packages)

    async def story() -> None:
        async with node(tmp_path / "data", only(index)) as (environments, _):
            with pytest.raises(BuildFailed, match=says):
                async with environments.prepare(environment_name(wanted), wanted, silent, LIMITS):
                    raise AssertionError("it was built")

    within(story())


def test_a_build_that_is_called_off_leaves_nothing(index: PackageIndex, tmp_path: Path) -> None:
    backend = "import sys, time\nprint('begun', file=sys.stderr, flush=True)\ntime.sleep(1000)\n"
    index.sdist("slow", backend)
    wanted = recipe(packages=("slow",))

    async def story() -> None:
        async with node(tmp_path / "data", only(index)) as (environments, _):
            heard = asyncio.Event()

            async def ask() -> None:
                async with environments.prepare(
                    environment_name(wanted), wanted, lambda _: heard.set(), LIMITS
                ):
                    raise AssertionError("it was built")

            asking = asyncio.create_task(ask())
            await heard.wait()
            # a killed agent's next one sweeps `building`: nothing of a build lies elsewhere
            places = set(os.listdir(tmp_path / "data" / "environments"))
            assert places == {"ready", "building", "empty"}
            asking.cancel()
            await asyncio.wait([asking])
            assert asking.cancelled()

    within(story())


ROOTLESS = """
import asyncio, json, os, sys
from pathlib import Path
from gpool.agent.services import environments_for
from gpool.agent.runtime.bubblewrap.runtime import BubblewrapRuntime
from gpool.agent.runtime.protocol import CommandJob
from gpool.core.specs.fields import environment_name, recipe
from tests.tools.runtimes import LIMITS

async def main():
    assert os.geteuid() != 0
    data, index = Path(sys.argv[1]), sys.argv[2]
    runtime = BubblewrapRuntime(data)
    environ = {"HOME": str(data), "PIP_INDEX_URL": index, "PIP_CONFIG_FILE": "/dev/null"}
    environments = environments_for(data, runtime, None, environ, clock=lambda: 0)
    await environments.sweep()
    wanted = recipe(packages=("thing",))
    async with environments.prepare(environment_name(wanted), wanted, lambda _: None, LIMITS) as prepared:
        code = "import thing; print(thing.VERSION)"
        job = CommandJob(("python", "-c", code), (), (), (), LIMITS, environment=prepared)
        sandbox = await runtime.start_command(job)
        text = b"".join([data async for _, data in sandbox.output()])
        await sandbox.remove()
    await environments.close()
    await runtime.close()
    print("said", text.decode())

asyncio.run(main())
"""


def test_an_unprivileged_agent_builds_as_well(require: Callable[[str], None]) -> None:
    for component in ("root", "bubblewrap", "uv"):
        require(component)
    with tempfile.TemporaryDirectory() as name:  # pytest closes the folder above its own to others
        index = PackageIndex(Path(name) / "index")
        index.wheel("thing")
        for path in [Path(name), index.folder, *index.folder.rglob("*")]:
            path.chmod(0o755)
        assert "said 1.0\n" in unprivileged.run(ROOTLESS, index.address)


# ---- what the scripts of a package can reach

HOSTILE = """
import base64, json, os, socket, stat, sys
def tried(work):
    try:
        return repr(work())
    except BaseException as error:
        return "refused: " + type(error).__name__
def connect():
    socket.create_connection(("127.0.0.1", PORT), 2).close()
    return "connected"
def write(path):
    with open(path, "a") as file:
        file.write("poison")
    return "written"
found = {
    "secret": tried(lambda: os.environ["GPOOL_TEST_SECRET"]),
    "read": tried(lambda: open(SECRET).read()),
    "index": tried(lambda: write(PAGE)),
    "home": tried(lambda: write(NOTE)),
    "connect": tried(connect),
}
def build_wheel(directory, settings=None, metadata=None):
    name = "hostile-1.0-py3-none-any.whl"
    with open(os.path.join(directory, name), "wb") as file:
        file.write(wheel(json.dumps(found)))
    return name
def wheel(text):
    import io, zipfile
    held = io.BytesIO()
    with zipfile.ZipFile(held, "w") as archive:
        archive.writestr("hostile.py", "FOUND = " + repr(text))
        archive.writestr("hostile-1.0.dist-info/METADATA", "Metadata-Version: 2.2\\nName: hostile\\nVersion: 1.0\\n")
        archive.writestr("hostile-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\\nGenerator: x\\nRoot-Is-Purelib: true\\nTag: py3-none-any\\n")
        archive.writestr("hostile-1.0.dist-info/RECORD", "hostile.py,,\\n")
    return held.getvalue()
"""
READ = "import hostile; print(hostile.FOUND)"


@pytest.fixture
def listener() -> Any:
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server.getsockname()[1]


def attack(index: PackageIndex, tmp_path: Path, port: int) -> None:
    (tmp_path / "secret").write_text("planted")
    index.wheel("victim")
    told = {
        "PORT": port,
        "SECRET": str(tmp_path / "secret"),
        "PAGE": str(index.pages / "victim" / "index.html"),
        "NOTE": str(tmp_path / "note"),
    }
    index.sdist("hostile", "".join(f"{k} = {v!r}\n" for k, v in told.items()) + HOSTILE)


def test_a_packages_scripts_reach_nothing_outside_their_build(
    index: PackageIndex, tmp_path: Path, listener: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    attack(index, tmp_path, listener)
    monkeypatch.setenv("GPOOL_TEST_SECRET", "planted")
    before = (index.pages / "victim" / "index.html").read_text()
    wanted = recipe(packages=("hostile",))

    async def story() -> dict[str, str]:
        async with (
            node(tmp_path / "data", only(index)) as (environments, runtime),
            environments.prepare(environment_name(wanted), wanted, silent, LIMITS) as prepared,
        ):
            found: dict[str, str] = json.loads(await said(runtime, prepared, "python", "-c", READ))
            return found

    found = within(story())
    assert found.pop("home").startswith(
        ("refused", "'written'")
    )  # in a place of its own, if at all
    assert all(what.startswith("refused") for what in found.values()), found
    assert (index.pages / "victim" / "index.html").read_text() == before
    assert not (tmp_path / "note").exists()


def test_the_same_scripts_reach_all_of_it_without_the_sandbox(
    index: PackageIndex, tmp_path: Path, listener: int
) -> None:
    """The control."""
    attack(index, tmp_path, listener)
    uv = find_uv()
    assert uv is not None
    subprocess.run(
        [
            uv,
            "pip",
            "install",
            "-q",
            "--target",
            tmp_path / "into",
            "--python",
            sys.executable,
            "hostile",
        ],
        env={
            "UV_DEFAULT_INDEX": index.address,
            "UV_CACHE_DIR": str(tmp_path / "cache"),
            "UV_NO_CONFIG": "1",
            "GPOOL_TEST_SECRET": "planted",
        },
        check=True,
    )
    told = subprocess.run(
        [sys.executable, "-c", READ], cwd=tmp_path / "into", capture_output=True, check=True
    ).stdout
    found = json.loads(told)
    assert found == {
        "secret": "'planted'",
        "read": "'planted'",
        "index": "'written'",
        "home": "'written'",
        "connect": "'connected'",
    }


SPREADING = """
import os, pathlib
PLACES = [os.environ.get("UV_CACHE_DIR", "/nowhere"), "/tmp", "/work", "/dev/shm", os.path.expanduser("~")]
seen = [place for place in PLACES if os.path.exists(place + "/poison")]
for place in PLACES:
    try:
        pathlib.Path(place, "poison").write_text("x")
    except OSError:
        pass
raise RuntimeError("found poison in %r, left it in %d" % (seen, sum(os.path.exists(p + "/poison") for p in PLACES)))
"""


def test_what_one_build_leaves_another_never_finds(index: PackageIndex, tmp_path: Path) -> None:
    """The control is in it: each of them does leave something."""
    for name in ("first", "second"):
        index.sdist(name, SPREADING)

    async def story() -> None:
        async with node(tmp_path / "data", only(index)) as (environments, _):
            for name in ("first", "second"):
                wanted = recipe(packages=(name,))
                with pytest.raises(BuildFailed, match=r"found poison in \[\], left it in [45]"):
                    async with environments.prepare(
                        environment_name(wanted), wanted, silent, LIMITS
                    ):
                        raise AssertionError("it was built")

    within(story())


# ---- what a build is given, with a stand-in for the sandbox


FAILED = SandboxExit(1)


class Given:
    """Stands in for a runtime: keeps the jobs, prints what it is told to, ends each step as told."""

    def __init__(self, output: Sequence[bytes] = (), *ends: SandboxExit) -> None:
        self.jobs: list[CommandJob] = []
        self.taken: list[str] = []
        self._output, self._ends = output, list(ends or (FAILED,))

    async def start_command(self, job: CommandJob) -> Any:
        self.jobs.append(job)
        return self

    async def output(self) -> AsyncIterator[tuple[int, bytes]]:
        for data in self._output:
            yield 2, data

    async def ended(self) -> SandboxExit:
        return self._ends[len(self.jobs) - 1]

    async def take(self, directory: str, to: Path) -> None:
        os.mkdir(to)
        self.taken.append(directory)

    async def collect(self, wanted: Sequence[str], into: Path) -> list[OutputFile]:
        raise AssertionError(f"{wanted} into {into}: a build collects nothing")

    async def read_end(self, name: str, most_bytes: int) -> bytes:
        raise AssertionError(f"{name}, {most_bytes} bytes: a build reports no progress")

    async def warn(self) -> None:
        return

    async def kill(self) -> None:
        return

    async def remove(self) -> None:
        return


@asynccontextmanager
async def lane(_indexes: Indexes) -> AsyncIterator[SandboxNetwork | None]:
    yield LANE


async def built(given: Given, folder: Path, indexes: Indexes) -> list[str]:
    lines: list[str] = []
    builder = UvBuilder(given, folder, Path("/somewhere/uv"), indexes, lane)
    wanted = Recipe(None, ("numpy>=2",))
    await builder.build(wanted, OWN, folder / "env", lines.append, LIMITS)
    return lines


def test_a_build_gets_what_the_indexes_need_and_no_variable_of_the_agents(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GPOOL_TEST_SECRET", "planted")
    certificate = tmp_path / "ca.pem"
    certificate.write_text("x")
    given = Given()
    indexes = Indexes("https://index.test/simple", certificate=certificate)
    with pytest.raises(BuildFailed):
        asyncio.run(built(given, tmp_path, indexes))
    variables = dict(given.jobs[0].env)
    assert "planted" not in variables.values()
    assert not {"HOME", "PATH", "USER"} & set(variables)
    assert variables["UV_DEFAULT_INDEX"] == "https://index.test/simple"
    environment = given.jobs[0].environment
    assert environment is not None
    assert environment.binds[variables["SSL_CERT_FILE"]] == certificate
    assert "UV_NO_BUILD" not in variables
    assert given.jobs[0].limits == LIMITS


def test_only_the_download_has_a_network_and_a_proxy_and_it_builds_nothing(tmp_path: Path) -> None:
    given = Given((), SandboxExit(FETCHED), SandboxExit(0))
    proxies = (("HTTPS_PROXY", "http://proxy.test:3128"),)
    asyncio.run(built(given, tmp_path, Indexes("https://index.test/simple", proxies=proxies)))
    download, build = given.jobs
    assert download.network is LANE
    assert dict(download.env)["HTTPS_PROXY"] == "http://proxy.test:3128"
    assert "--no-build" in download.argv[-1]
    assert build.network is None
    assert not [value for _, value in build.env if "proxy" in value]
    assert "--offline" in build.argv[-1]
    assert given.taken == ["fetched", "env"]


def test_wheels_need_one_step(tmp_path: Path) -> None:
    given = Given((), SandboxExit(0))
    asyncio.run(built(given, tmp_path, Indexes("https://index.test/simple")))
    assert given.taken == ["env"]


def test_where_an_address_has_a_password_no_script_runs_and_no_line_shows_it(
    tmp_path: Path,
) -> None:
    given = Given([b"cannot fetch https://me:s3", b"cret@index.test/simple/x\nnor s3cret\n"])
    indexes = Indexes("https://me:s3cret@index.test/simple")
    lines: list[str] = []
    builder = UvBuilder(given, tmp_path, Path("/somewhere/uv"), indexes, lane)
    wanted = Recipe(None, ("numpy",))
    with pytest.raises(BuildFailed, match="installs wheels only") as failed:
        asyncio.run(builder.build(wanted, OWN, tmp_path / "env", lines.append, LIMITS))
    variables = dict(given.jobs[0].env)
    assert (variables["UV_NO_BUILD"], variables["SOURCES"]) == ("1", "")
    assert lines == ["cannot fetch https://****@index.test/simple/x", "nor ****"]
    assert "s3cret" not in str(failed.value)
    assert "s3cret" not in repr(given.jobs[0])


def test_a_nodes_fault_is_told_apart_from_a_recipes_and_never_by_its_output(tmp_path: Path) -> None:
    remote = Indexes("https://index.test/simple")
    for ended in (
        SandboxExit(1, EndReason.SANDBOX_FAILED, "no bwrap"),
        SandboxExit(UNREACHABLE),
    ):
        with pytest.raises(SandboxFailed) as failed:
            asyncio.run(built(Given((), ended), tmp_path, remote))
        assert not isinstance(failed.value, BuildFailed)
    dns = [b"  cause: dns error\noperation timed out\n"]
    for output, ends in (
        ([b"no solution\n"], [SandboxExit(1)]),
        ([], [SandboxExit(137, EndReason.OUT_OF_MEMORY, "it used more memory")]),
        (dns, [SandboxExit(2)]),
        (dns, [SandboxExit(FETCHED), SandboxExit(UNREACHABLE)]),  # a package's own exit code
    ):
        with pytest.raises(BuildFailed):
            asyncio.run(built(Given(output, *ends), tmp_path, remote))


# ---- what the owner and the lease allow


def test_the_owners_no_index_is_obeyed(index: PackageIndex, tmp_path: Path) -> None:
    """The control is the same build without it."""
    index.wheel("thing")
    curated = PackageIndex(tmp_path / "curated")
    curated.wheel("listed")
    wanted = recipe(packages=("thing", "listed"))

    async def tried(data: Path, no_index: bool) -> None:
        indexes = Indexes(index.address, find_links=(str(curated.files),), no_index=no_index)
        async with (
            node(data, indexes) as (environments, _),
            environments.prepare(environment_name(wanted), wanted, silent, LIMITS),
        ):
            return

    with pytest.raises(BuildFailed, match="thing was not found"):
        within(tried(tmp_path / "a", no_index=True))
    within(tried(tmp_path / "b", no_index=False))


GREEDY = """
held = bytearray(b"x" * (300 << 20))
raise RuntimeError("it got %d MiB" % (len(held) >> 20))
"""


def test_a_build_uses_no_more_memory_than_its_lease(index: PackageIndex, tmp_path: Path) -> None:
    """The control is a lease of twice as much."""
    index.sdist("greedy", GREEDY)
    wanted = recipe(packages=("greedy",))

    async def tried(data: Path, memory_bytes: int) -> None:
        limits = SandboxLimits(2000, memory_bytes)
        async with (
            node(data, only(index)) as (environments, _),
            environments.prepare(environment_name(wanted), wanted, silent, limits),
        ):
            return

    with pytest.raises(BuildFailed, match="ask for more with --memory"):
        within(tried(tmp_path / "a", 256 << 20))
    with pytest.raises(BuildFailed, match="it got 300 MiB"):
        within(tried(tmp_path / "b", 1 << 30))
