"""Live views: rendered once for all viewers, only changes are sent, updates are small."""

from __future__ import annotations

import pytest

from gpool.server.web.live import MAX_UPDATE_BYTES, Fragment, Fragments, LiveViews, Viewer

pytestmark = pytest.mark.anyio


class Source:
    """A view whose fragments the test sets."""

    def __init__(self, **fragments: str) -> None:
        self.fragments: dict[str, Fragment] = {k: Fragment(v) for k, v in fragments.items()}
        self.renders = 0

    async def render(self) -> Fragments:
        self.renders += 1
        return dict(self.fragments)


async def test_viewers_of_one_view_share_its_rendering() -> None:
    source, views = Source(a="1", b="2"), LiveViews()
    for _ in range(100):
        await views.fresh("key", source.render)
    assert source.renders == 1
    await views.fresh("another", source.render)
    assert source.renders == 2


async def test_only_changed_fragments_are_sent() -> None:
    source, views = Source(a="1", b="2"), LiveViews()
    viewer = Viewer(views.version)
    view = await views.fresh("key", source.render, 0)
    page = Viewer(views.version)  # of a page that was rendered now
    assert page.update(view) == ""
    assert viewer.update(view).count("<hx-partial") == 2
    source.fragments["b"] = Fragment("3")
    view = await views.fresh("key", source.render, 0)
    for each in (viewer, page):
        update = each.update(view)
        assert update == '<hx-partial hx-target="#b" hx-swap="outerMorph">3</hx-partial>'
        assert each.update(view) == ""


async def test_a_list_is_sent_when_its_members_change_not_their_content() -> None:
    source, views = Source(), LiveViews()
    source.fragments = {"list": Fragment("<ul>1</ul>", "a"), "a": Fragment("1")}
    viewer = Viewer(0)
    viewer.update(await views.fresh("key", source.render, 0))
    source.fragments = {"list": Fragment("<ul>2</ul>", "a"), "a": Fragment("2")}
    assert "list" not in viewer.update(await views.fresh("key", source.render, 0))
    source.fragments = {"list": Fragment("<ul>2 3</ul>", "a b"), "a": Fragment("2")}
    assert "<ul>2 3</ul>" in viewer.update(await views.fresh("key", source.render, 0))


async def test_an_update_has_at_most_five_kilobytes_and_the_rest_follows() -> None:
    source, views = Source(**{f"g-{number}": "x" * 400 for number in range(40)}), LiveViews()
    viewer, sent = Viewer(0), 0
    view = await views.fresh("key", source.render, 0)
    while update := viewer.update(view):
        assert len(update.encode()) <= MAX_UPDATE_BYTES
        sent += update.count("<hx-partial")
    assert sent == 40


async def test_a_large_list_is_offered_instead_of_sent() -> None:
    source, views = Source(), LiveViews()
    source.fragments = {"list": Fragment("x" * 6000, "a")}
    update = Viewer(0).update(await views.fresh("key", source.render, 0))
    assert "The list changed" in update
    assert len(update) < 300
