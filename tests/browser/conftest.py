"""A pool with simulated GPUs, and chromium. Every page is watched: errors, refused content, dialogs fail the test."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import pytest
from playwright.sync_api import Browser, BrowserContext, Page, expect, sync_playwright

from tests.tools.processes import LONG_LEASE, Pool

APPEARS_MS = 60_000
"""For what only has to appear."""
FLAGS = ["--no-sandbox", "--disable-gpu", "--disable-background-networking"]


@pytest.fixture(scope="module")
def chromium(require: Callable[[str], None]) -> Iterator[Browser]:
    """Per module: while Playwright runs, no other test of the process can call `asyncio.run`."""
    require("chromium")
    expect.set_options(timeout=APPEARS_MS)
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path="/usr/bin/chromium", args=FLAGS)
        yield browser
        browser.close()


@pytest.fixture(scope="module")
def pool(
    tmp_path_factory: pytest.TempPathFactory, require: Callable[[str], None]
) -> Iterator[Pool]:
    require("bubblewrap")
    pool = Pool(tmp_path_factory.mktemp("pool"), LONG_LEASE)
    try:
        pool.start(agents=())
        pool.join("vega", "--simulate-gpus", "H100:2,RTX4090")
        yield pool
    finally:
        pool.stop()


@dataclass
class Visit:
    """One tab; `faults` are all that no page may cause."""

    page: Page
    base: str
    faults: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.page.set_default_timeout(APPEARS_MS)
        self.page.on("pageerror", lambda error: self.faults.append(f"error: {error}"))
        self.page.on("dialog", lambda dialog: self._dialog(dialog.message, dialog.accept))
        self.page.on("console", lambda said: self._said(said.type, said.text))

    def _said(self, kind: str, text: str) -> None:
        if kind in ("error", "warning"):
            self.faults.append(f"{kind}: {text}")

    def _dialog(self, message: str, accept: Callable[[], None]) -> None:
        if not message.startswith("Cancel"):
            self.faults.append(f"dialog: {message}")
        accept()

    def open(self, path: str) -> None:
        self.page.goto(self.base + path)

    def sign_in(self, pool: Pool) -> None:
        """Open the one-time link that `gpool up` prints."""
        self.open(pool.ask("POST", "/v1/auth/links", {}).json()["path"])
        self.page.wait_for_url(f"{self.base}/")


def _context(chromium: Browser, width: int, **more: str) -> BrowserContext:
    return chromium.new_context(viewport={"width": width, "height": 800}, **more)  # type: ignore[arg-type]


@pytest.fixture(params=[1280, 380], ids=["wide", "phone"])
def visit(request: pytest.FixtureRequest, chromium: Browser, pool: Pool) -> Iterator[Visit]:
    """A signed-in tab, wide and as a phone's."""
    with _context(chromium, request.param) as context:
        visit = Visit(context.new_page(), pool.address)
        visit.sign_in(pool)
        yield visit
        assert visit.faults == []


@pytest.fixture
def bare_visit(chromium: Browser, pool: Pool) -> Iterator[Visit]:
    """A tab that nobody signed in."""
    with _context(chromium, 1280) as context:
        yield Visit(context.new_page(), pool.address)
