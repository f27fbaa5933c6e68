"""The shelf of environments: one build for many, nothing removed in use, nothing changed in place."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from pathlib import Path

import pytest

from gpool.agent.environments import BuildFailed, Environments, Interpreter, Told
from gpool.agent.environments.environments import REMEMBERED_US
from gpool.agent.environments.interpreters import MANIFEST, measured
from gpool.agent.runtime.protocol import (
    ENVIRONMENT_AT,
    PreparedEnvironment,
    SandboxFailed,
    SandboxLimits,
)
from gpool.core.errors import Invalid
from gpool.core.model import Recipe
from gpool.core.specs.fields import environment_name, recipe

OTHER = Path("/somewhere/python3.99")
INTERPRETERS = {
    "3.11": Interpreter("3.11", (3, 11, 2), "/usr/bin/python3.11"),
    "3.99": Interpreter(
        "3.99", (3, 99, 0), "/opt/gpool/python3.99/bin/python3.99", {"/opt/gpool/python3.99": OTHER}
    ),
}
A, B, C = (recipe(packages=(one,)) for one in ("aaa", "bbb", "ccc"))
SIZE = 100_000
LEASE = SandboxLimits(1000, 1 << 30)
LARGE = SandboxLimits(4000, 8 << 30)


class FakeBuilder:
    """Lays one file of 100,000 bytes and a distribution, when it is allowed to."""

    def __init__(self) -> None:
        self.built: list[Recipe] = []
        self.limits: list[SandboxLimits] = []
        self.called_off = 0
        self.begun = asyncio.Event()
        self.open = asyncio.Event()
        self.open.set()
        self.wrong: dict[Recipe, Exception] = {}

    async def build(
        self,
        recipe: Recipe,
        interpreter: Interpreter,
        into: Path,
        told: Told,
        limits: SandboxLimits,
    ) -> None:
        self.built.append(recipe)
        self.limits.append(limits)
        self.begun.set()
        told("resolving")
        os.mkdir(into)
        try:
            await self.open.wait()
        except asyncio.CancelledError:
            self.called_off += 1
            raise
        if (wrong := self.wrong.get(recipe)) is not None:
            raise wrong
        site = into / "lib" / f"python{interpreter.minor}" / "site-packages"
        site.mkdir(parents=True)
        (site / f"{recipe.packages[0]}-{len(self.built)}.0.dist-info").mkdir()
        (site / "data").write_bytes(b"x" * SIZE)


class Shelf:
    """Environments with a fake builder and a clock that stands until it is told."""

    def __init__(self, folder: Path, limit_bytes: int = 1 << 30) -> None:
        self.builder = FakeBuilder()
        self.now = 0
        self.folder = folder
        self.environments = Environments(
            folder,
            self.builder,
            limit_bytes=limit_bytes,
            interpreters=INTERPRETERS,
            own="3.11",
            clock=lambda: self.now,
            free_bytes=lambda: self.free,
        )
        self.free = 1 << 40

    async def once(
        self, wanted: Recipe, told: Told = lambda _: None, limits: SandboxLimits | None = LEASE
    ) -> PreparedEnvironment:
        kept = self.environments.prepare(environment_name(wanted), wanted, told, limits)
        async with kept as prepared:
            assert prepared is not None
            assert prepared.root.is_dir()
            return prepared

    def on_disk(self) -> int:
        return len(list((self.folder / "ready").iterdir()))

    def asking(
        self, wanted: Recipe, limits: SandboxLimits = LEASE
    ) -> asyncio.Task[PreparedEnvironment]:
        return asyncio.create_task(self.once(wanted, limits=limits))


def story(folder: Path, tell: Callable[[Shelf], Awaitable[None]], **options: int) -> None:
    async def whole() -> None:
        shelf = Shelf(folder, **options)
        await shelf.environments.sweep()
        await tell(shelf)
        await shelf.environments.close()
        assert list((folder / "building").iterdir()) == []

    asyncio.run(whole())


def test_many_who_ask_at_once_cause_one_build_and_all_hear_it(tmp_path: Path) -> None:
    async def tell(shelf: Shelf) -> None:
        shelf.builder.open.clear()
        heard: list[list[str]] = [[] for _ in range(20)]
        asking = [asyncio.create_task(shelf.once(A, lines.append)) for lines in heard[:10]]
        await shelf.builder.begun.wait()
        asking += [asyncio.create_task(shelf.once(A, lines.append)) for lines in heard[10:]]
        await asyncio.sleep(0)
        shelf.builder.open.set()
        assert len({prepared.root for prepared in await asyncio.gather(*asking)}) == 1
        assert shelf.builder.built == [A]
        assert heard == [["resolving", "environment of Python 3.11 with aaa==1.0"]] * 20

    story(tmp_path, tell)


def test_what_is_ready_is_given_as_it_is(tmp_path: Path) -> None:
    async def tell(shelf: Shelf) -> None:
        first = await shelf.once(A)
        assert await shelf.once(A) == first
        assert shelf.builder.built == [A]
        assert shelf.environments.ready() == {environment_name(A)}
        assert first.name == environment_name(A)
        assert first.python == f"{ENVIRONMENT_AT}/bin/python"
        manifest = shelf.environments.manifest(environment_name(A), A)
        assert manifest is not None
        assert manifest.chosen == ("aaa==1.0",)
        assert manifest.packages == ("aaa",)

    story(tmp_path, tell)


def test_nothing_asked_for_needs_no_environment(tmp_path: Path) -> None:
    async def tell(shelf: Shelf) -> None:
        for nothing in (None, Recipe(), recipe("3.11")):
            async with shelf.environments.prepare("default", nothing) as prepared:
                assert prepared is None
        assert shelf.builder.built == []

    story(tmp_path, tell)


def test_another_python_alone_is_laid_without_a_build(tmp_path: Path) -> None:
    async def tell(shelf: Shelf) -> None:
        prepared = await shelf.once(recipe("3.99"))
        assert prepared.binds == {"/opt/gpool/python3.99": OTHER}
        link = prepared.root / "bin" / "python"
        assert os.readlink(link) == "/opt/gpool/python3.99/bin/python3.99"
        assert "home = /opt/gpool/python3.99/bin\n" in (prepared.root / "pyvenv.cfg").read_text()
        assert shelf.builder.built == []
        assert shelf.environments.ready() == frozenset()
        assert shelf.environments.pythons() == {"3.11", "3.99"}

    story(tmp_path, tell)


@pytest.mark.parametrize(
    ("name", "wanted", "says"),
    [
        (environment_name(A), B, "not the name of its environment spec"),
        ("default", A, "not the name of its environment spec"),
        (environment_name(A), Recipe(None, ("AAA",)), "normal form"),
        (
            environment_name(A),
            Recipe(None, ("aaa @ https://example.test/a.whl",)),
            "names an address",
        ),
        ("image:debian", recipe(image="debian"), "is an image"),
        (
            environment_name(recipe("3.98", ("aaa",))),
            recipe("3.98", ("aaa",)),
            "no Python 3.98 .* it has 3.11, 3.99",
        ),
    ],
)
def test_a_name_never_stands_for_another_recipe(
    tmp_path: Path, name: str, wanted: Recipe, says: str
) -> None:
    async def tell(shelf: Shelf) -> None:
        with pytest.raises(Invalid, match=says):
            async with shelf.environments.prepare(name, wanted):
                raise AssertionError("it was given")
        assert shelf.builder.built == []

    story(tmp_path, tell)


def test_the_least_used_goes_first_past_the_limit(tmp_path: Path) -> None:
    async def tell(shelf: Shelf) -> None:
        for wanted in (A, B, A, C):
            await shelf.once(wanted)
        assert shelf.environments.ready() == {environment_name(A), environment_name(C)}
        assert shelf.on_disk() == 2
        assert shelf.environments.size_bytes <= 250_000

    story(tmp_path, tell, limit_bytes=250_000)


def test_one_in_use_is_never_removed(tmp_path: Path) -> None:
    async def tell(shelf: Shelf) -> None:
        async with AsyncExitStack() as held:
            entered = [
                await held.enter_async_context(
                    shelf.environments.prepare(environment_name(one), one, limits=LEASE)
                )
                for one in (A, B, C)
            ]
            assert all(one is not None and one.root.is_dir() for one in entered)
            assert shelf.on_disk() == 3
        assert shelf.on_disk() == 1

    story(tmp_path, tell, limit_bytes=150_000)


def test_one_that_alone_is_over_the_limit_is_refused(tmp_path: Path) -> None:
    async def tell(shelf: Shelf) -> None:
        with pytest.raises(BuildFailed, match="keeps at most 50000"):
            await shelf.once(A)
        assert shelf.on_disk() == 0

    story(tmp_path, tell, limit_bytes=50_000)


def test_a_failed_build_is_not_tried_again_at_once(tmp_path: Path) -> None:
    async def tell(shelf: Shelf) -> None:
        shelf.builder.wrong[A] = BuildFailed("no such package: aaa")
        with pytest.raises(BuildFailed, match=r"^no such package: aaa$"):
            await shelf.once(A)
        shelf.now += REMEMBERED_US // 2
        with pytest.raises(BuildFailed, match=r"no such package: aaa\n.*again in 31 s"):
            await shelf.once(A)
        assert shelf.builder.built == [A]
        await shelf.once(B)
        shelf.builder.wrong.clear()
        shelf.now += REMEMBERED_US
        await shelf.once(A)
        assert shelf.builder.built == [A, B, A]

    story(tmp_path, tell)


def test_a_nodes_own_fault_is_not_held_against_the_recipe(tmp_path: Path) -> None:
    async def tell(shelf: Shelf) -> None:
        shelf.builder.wrong[A] = SandboxFailed("no sandbox")
        with pytest.raises(SandboxFailed):
            await shelf.once(A)
        shelf.builder.wrong.clear()
        await shelf.once(A)

    story(tmp_path, tell)


def test_the_last_one_to_give_up_calls_the_build_off(tmp_path: Path) -> None:
    async def tell(shelf: Shelf) -> None:
        shelf.builder.open.clear()
        first, second = shelf.asking(A), shelf.asking(A)
        await shelf.builder.begun.wait()
        first.cancel()
        await asyncio.wait([first])
        assert not shelf.builder.called_off
        second.cancel()
        await asyncio.wait([second])
        assert shelf.builder.called_off == 1
        assert list((tmp_path / "building").iterdir()) == []
        shelf.builder.open.set()
        await shelf.once(A)

    story(tmp_path, tell)


def test_one_who_comes_as_the_last_gives_up_gets_a_build_of_its_own(tmp_path: Path) -> None:
    async def tell(shelf: Shelf) -> None:
        shelf.builder.open.clear()
        first = shelf.asking(A)
        await shelf.builder.begun.wait()
        first.cancel()
        second = shelf.asking(A)
        await asyncio.wait([first])
        shelf.builder.open.set()
        assert (await second).root.is_dir()
        assert first.cancelled()

    story(tmp_path, tell)


@pytest.mark.parametrize("steps", range(12))
def test_one_who_gives_up_at_any_moment_never_keeps_it_in_use(tmp_path: Path, steps: int) -> None:
    async def tell(shelf: Shelf) -> None:
        over = asyncio.Event()
        first = asyncio.create_task(shelf.once(A, lambda line: "aaa==" in line and over.set()))
        second = shelf.asking(A)
        await over.wait()  # the build is done, and nobody was told so
        for _ in range(steps):
            await asyncio.sleep(0)
        first.cancel()
        await asyncio.wait([first, second])
        shelf.environments.forget(environment_name(A))
        assert shelf.on_disk() == 0

    story(tmp_path, tell)


def test_forgetting_makes_a_new_build_and_leaves_the_old_to_its_users(tmp_path: Path) -> None:
    async def tell(shelf: Shelf) -> None:
        async with shelf.environments.prepare(environment_name(A), A, limits=LEASE) as old:
            assert old is not None
            shelf.environments.forget(environment_name(A))
            assert shelf.environments.ready() == frozenset()
            new = await shelf.once(A)
            assert new.root != old.root
            assert old.root.is_dir()
            manifest = shelf.environments.manifest(environment_name(A), A)
            assert manifest is not None
            assert manifest.chosen == ("aaa==2.0",)
        assert not old.root.exists()
        assert new.root.is_dir()

    story(tmp_path, tell)


def test_what_an_earlier_agent_built_is_found_again_in_its_order(tmp_path: Path) -> None:
    async def before(shelf: Shelf) -> None:
        for wanted in (A, B, C, A):
            await shelf.once(wanted)
        ordered = sorted(
            (tmp_path / "ready").iterdir(), key=lambda f: (f / MANIFEST).stat().st_mtime_ns
        )
        for number, folder in enumerate(ordered):  # the disk's clock may be coarse
            os.utime(folder / MANIFEST, (number, number))

    async def after(shelf: Shelf) -> None:
        assert shelf.environments.ready() == {environment_name(A), environment_name(C)}
        await shelf.once(A)
        assert shelf.builder.built == []

    story(tmp_path, before)
    story(tmp_path, after, limit_bytes=250_000)


def test_what_is_half_done_or_of_a_python_that_is_gone_is_removed(tmp_path: Path) -> None:
    async def before(shelf: Shelf) -> None:
        for wanted in (A, B, recipe("3.99", ("aaa",))):
            await shelf.once(wanted)
        for folder in (tmp_path / "ready").iterdir():
            text = (folder / MANIFEST).read_text()
            if environment_name(A) in text:
                (folder / MANIFEST).write_text(text[:50])
            elif "3.99" in text:
                (folder / MANIFEST).write_text(text.replace("/opt/gpool/", "/elsewhere/"))

    async def after(shelf: Shelf) -> None:
        assert shelf.environments.ready() == {environment_name(B)}
        assert shelf.on_disk() == 1

    story(tmp_path, before)
    (tmp_path / "building" / "left").mkdir()
    (tmp_path / "building" / "left" / "file").write_text("half")
    story(tmp_path, after)


def test_measuring_follows_no_link_and_counts_a_file_of_two_names_once(tmp_path: Path) -> None:
    site = tmp_path / "lib" / "site-packages"
    (site / "some_thing-1.2.dist-info").mkdir(parents=True)
    (site / "x-; rm -rf.dist-info").mkdir()
    plain = measured(tmp_path)
    (site / "one").write_bytes(b"x" * SIZE)
    once = measured(tmp_path).size_bytes
    os.link(site / "one", site / "two")
    (site / "loop").symlink_to(tmp_path)
    (site / "out").symlink_to("/usr")
    assert plain.chosen == ("some-thing==1.2",)
    assert once - plain.size_bytes >= SIZE
    assert measured(tmp_path).size_bytes < once + SIZE


# ---- limits of a build


def test_a_build_has_the_limits_of_the_lease_that_asks(tmp_path: Path) -> None:
    async def tell(shelf: Shelf) -> None:
        await shelf.once(A, limits=LEASE)
        await shelf.once(B, limits=LARGE)
        assert shelf.builder.limits == [LEASE, LARGE]

    story(tmp_path, tell)


def test_without_a_lease_nothing_is_built_and_what_is_ready_is_given(tmp_path: Path) -> None:
    async def tell(shelf: Shelf) -> None:
        with pytest.raises(SandboxFailed, match="no lease asks for it"):
            await shelf.once(A, limits=None)
        assert shelf.builder.built == []
        ready = await shelf.once(A)
        assert await shelf.once(A, limits=None) == ready

    story(tmp_path, tell)


def test_a_build_never_goes_on_with_more_than_the_leases_that_wait_for_it(tmp_path: Path) -> None:
    """The large lease that began it ends; the small one gets a build of its own size."""

    async def tell(shelf: Shelf) -> None:
        shelf.builder.open.clear()
        large = shelf.asking(A, LARGE)
        await shelf.builder.begun.wait()
        small = shelf.asking(A, LEASE)
        await asyncio.sleep(0)
        large.cancel()
        await asyncio.wait([large])
        shelf.builder.open.set()
        await small
        assert shelf.builder.limits == [LARGE, LEASE]
        assert shelf.builder.called_off == 1

    story(tmp_path, tell)


def test_a_build_goes_on_for_a_lease_as_large(tmp_path: Path) -> None:
    """The control of the one above."""

    async def tell(shelf: Shelf) -> None:
        shelf.builder.open.clear()
        first = shelf.asking(A, LEASE)
        await shelf.builder.begun.wait()
        second = shelf.asking(A, LARGE)
        await asyncio.sleep(0)
        first.cancel()
        await asyncio.wait([first])
        shelf.builder.open.set()
        await second
        assert shelf.builder.limits == [LEASE]

    story(tmp_path, tell)


def test_builds_together_get_no_more_disk_than_is_lent(tmp_path: Path) -> None:
    async def tell(shelf: Shelf) -> None:
        shelf.free = LEASE.disk_bytes + (100 << 20)
        shelf.builder.open.clear()
        asked = []
        for wanted in (A, B):
            shelf.builder.begun.clear()
            asked.append(shelf.asking(wanted))
            await shelf.builder.begun.wait()
        assert [one.disk_bytes for one in shelf.builder.limits] == [LEASE.disk_bytes, 100 << 20]
        with pytest.raises(SandboxFailed, match="0 bytes of disk are left for a build"):
            await shelf.once(C)
        shelf.builder.open.set()
        await asyncio.gather(*asked)
        await shelf.once(C)

    story(tmp_path, tell)
