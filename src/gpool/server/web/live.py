"""Live pages: fragments of a view are rendered once for all its viewers, and only changed ones are sent.

A fragment is the HTML of one element with an id. A page is built from the same fragments, and its stream begins after
their version. If elements come or go, the fragment of their list is sent; a large one becomes a line that offers it.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from time import monotonic
from typing import NamedTuple

from starlette.requests import Request
from starlette.responses import Response

from gpool.core.errors import GpoolError
from gpool.server.api.messages import stream
from gpool.server.web.visitors import is_signed_in_still

EVENT_STREAM = "text/event-stream"
EVERY_S = 2.0
SILENCE_S = 10.0
"""Interval of signs of life, and of the check that the session lasts."""
MAX_UPDATE_BYTES = 5000
KEPT_S = 60.0
NEWS = '<p id="news" class="note"><a href="">The list changed: show it again</a></p>'
"""Line instead of a fragment that is too large for an update."""
MOST_VIEWS = 500


class Fragment(NamedTuple):
    """HTML of one element. `key`: what changes it, where its parts are fragments of their own; empty: its HTML."""

    html: str
    key: str = ""


Fragments = Mapping[str, Fragment]
Render = Callable[[], Awaitable[Fragments]]


@dataclass
class LiveView:
    fragments: dict[str, Fragment] = field(default_factory=dict)
    versions: dict[str, int] = field(default_factory=dict)
    version: int = 0
    rendered_s: float = float("-inf")
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)

    def take(self, found: Fragments, version: int) -> None:
        for name, now in found.items():
            before = self.fragments.get(name)
            if before is None or (before.key, not now.key and before.html) != (
                now.key,
                not now.key and now.html,
            ):
                self.versions[name] = version
                self.version = version
        self.versions = {name: self.versions[name] for name in found}
        self.fragments = dict(found)


class LiveViews:
    def __init__(self) -> None:
        self._views: dict[Hashable, LiveView] = {}
        self._version = 0

    async def fresh(self, key: Hashable, render: Render, max_age_s: float = EVERY_S) -> LiveView:
        """The view, rendered again if it is older than `max_age_s`. Of several viewers one renders."""
        view = self._views.get(key)
        if view is None:
            self._forget()
            view = self._views[key] = LiveView()
        async with view.lock:
            if monotonic() - view.rendered_s >= max_age_s:
                self._version += 1
                view.take(await render(), self._version)
                view.rendered_s = monotonic()
        return view

    @property
    def version(self) -> int:
        """Version after which a page that is rendered now is out of date."""
        return self._version

    def _forget(self) -> None:
        old = monotonic() - KEPT_S
        kept = {key: view for key, view in self._views.items() if view.rendered_s > old}
        if len(kept) >= MOST_VIEWS:
            kept.clear()
        self._views = kept


def since_of(request: Request) -> int:
    """Version of the page whose stream this is."""
    text = request.query_params.get("since", "")
    return int(text) if text.isascii() and text.isdigit() and len(text) < 18 else 0


def views_of(request: Request) -> LiveViews:
    state = request.app.state
    if not hasattr(state, "live_views"):
        state.live_views = LiveViews()
    views: LiveViews = state.live_views
    return views


@dataclass
class Viewer:
    """Versions of the fragments that one browser has. `is_whole`: large fragments are sent, not offered."""

    since: int
    is_whole: bool = False
    sent: dict[str, int] = field(default_factory=dict)

    def update(self, view: LiveView) -> str:
        """Changed fragments as one message of at most `MAX_UPDATE_BYTES`; the rest comes with the next."""
        found: list[str] = []
        size = 0
        for name, version in view.versions.items():
            if version <= self.sent.get(name, self.since):
                continue
            html = partial(name, view.fragments[name].html)
            if len(html.encode()) > MAX_UPDATE_BYTES and not self.is_whole:
                html = partial("news", NEWS)
            size += len(html.encode())
            if size > MAX_UPDATE_BYTES and found:
                break
            self.sent[name] = version
            found.append(html)
        return "".join(found)


def partial(target: str, html: str, swap: str = "outerMorph") -> str:
    """Replacement of one element, as htmx reads it."""
    return f'<hx-partial hx-target="#{target}" hx-swap="{swap}">{html}</hx-partial>'


def message(html: str, id_: int | None = None) -> bytes:
    """Event with a replacement; a browser that connects again names the last `id_`."""
    data = "\n".join(f"data: {line}" for line in html.split("\n"))
    named = "" if id_ is None else f"id: {id_}\n"
    return f"{named}{data}\n\n".encode()


def event(name: str) -> bytes:
    return f"event: {name}\ndata: 1\n\n".encode()


async def live_answer(
    request: Request, sources: Sequence[tuple[Hashable, Render]], since: int
) -> Response:
    """A stream of changes, or for requests that accept none the changes until now."""
    if is_stream(request):
        return stream(changes(request, sources, since), EVENT_STREAM)
    views, viewer = views_of(request), Viewer(since)
    found = [viewer.update(await views.fresh(key, render)) for key, render in sources]
    return Response("".join(found), media_type="text/html; charset=utf-8")


def is_stream(request: Request) -> bool:
    return EVENT_STREAM in request.headers.get("accept", "")


async def changes(
    request: Request, sources: Sequence[tuple[Hashable, Render]], since: int
) -> AsyncIterator[bytes]:
    """Stream the changes of views until the browser leaves or the session ends."""
    views, viewer = views_of(request), Viewer(since)
    heard = checked = monotonic()
    while True:
        try:
            html = "".join(
                [viewer.update(await views.fresh(key, render)) for key, render in sources]
            )
        except GpoolError:  # overload, or a store that does not answer: the next turn tries again
            html = ""
        now = monotonic()
        if html:
            heard = now
            yield message(html)
        elif now - heard >= SILENCE_S:
            heard = now
            yield event("still")
        if now - checked >= SILENCE_S:
            checked = now
            if not await is_signed_in_still(request):
                yield event("signed-out")
                return
        await asyncio.sleep(EVERY_S)
