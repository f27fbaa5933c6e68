"""Names, output and files of tasks that attack the page: nothing runs, nothing is sent, nothing changes direction."""

from __future__ import annotations

from playwright.sync_api import Browser, expect

from tests.browser.conftest import Visit
from tests.tools.processes import Pool

MARK = "window.attacked = true"
MARKUP = (
    f"<script>{MARK}</script>",
    f'"><img src=x onerror="{MARK}">',
    f"</pre><svg onload='{MARK}'>",
    f"<hx-partial hx-target='body'><script>{MARK}</script></hx-partial>",
    f"<div hx-get='/account' hx-trigger='load' hx-on:htmx:load='{MARK}'>",
    "javascript:window.attacked=true",
    "{{ 7*7 }}${7*7}",
)
DOT = "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=="
"""A PNG of one pixel."""
CONTROLS = (
    "\x1b]8;;https://evil.example\x07click\x1b]8;;\x07",
    "\x1b]52;c;ZXZpbA==\x07clipboard",
    "\x1b[2J\x1b[Hcleared",
    "\u202egnp.exe",
    "\x1b[31mred\x1b[0m",
    "\x9d8;;x\x07c1",
)


def test_the_attack_is_noticed_where_nothing_defends(chromium: Browser) -> None:
    """The control: the same markup in a page without escaping and policy runs."""
    with chromium.new_context() as context:
        page = context.new_page()
        page.set_content(f"<p>{MARKUP[1]}</p>")
        page.wait_for_function("window.attacked === true")


def test_hostile_names_output_and_files_are_text(visit: Visit, pool: Pool) -> None:
    output = "\n".join((*MARKUP, *CONTROLS))
    program = f"import sys; sys.stdout.write({output!r}); open('<img src=x onerror=x>.txt','w').write({MARKUP[0]!r})"
    for name in MARKUP:
        document = {
            "command": ["python", "-c", program],
            "name": name,
            "outputs": ["<img src=x onerror=x>.txt"],
        }
        task = pool.ask("POST", "/v1/tasks", document).json()["ids"][0]
        page = visit.page
        visit.open(f"/tasks/{task}")  # live, if it is fast enough
        pool.ask("GET", f"/v1/tasks/{task}?wait=60")
        page.reload()
        expect(page.locator("#state")).to_contain_text("succeeded")
        expect(page.locator("#log")).to_contain_text("<script>")
        expect(page.locator("h1")).to_have_text(name)
        text = page.locator("#log").inner_text()
        assert "\x1b" not in text
        assert "evil.example" not in text  # the link's target is removed, its text stays
        assert "click" in text
        assert "\u202e" not in page.content()
        assert page.locator("#log .c1").inner_text() == "red"
        assert page.locator("#log a, #log script, #log img, #log svg").count() == 0
        for path in (f"/tasks/{task}", "/tasks", "/"):
            visit.open(path)
            assert page.evaluate("window.attacked") is None
        shown = page.goto(f"{visit.base}{_preview(visit, task)}")
        assert shown is not None
        assert shown.headers["content-type"].startswith("text/plain")
        assert "sandbox" in shown.headers["content-security-policy"]


def test_images_are_shown_and_files_that_only_look_like_images_run_nothing(
    visit: Visit, pool: Pool
) -> None:
    page = visit.page
    program = f"""
import base64
open('a.png', 'wb').write(base64.b64decode('{DOT}'))
open('b.png', 'w').write({MARKUP[0]!r})
open('c.svg', 'w').write('<svg xmlns="http://www.w3.org/2000/svg"><script>window.attacked=true</script></svg>')
"""
    document = {"command": ["python", "-c", program], "outputs": ["a.png", "b.png", "c.svg"]}
    task = pool.ask("POST", "/v1/tasks", document).json()["ids"][0]
    pool.ask("GET", f"/v1/tasks/{task}?wait=60")
    visit.open(f"/tasks/{task}")
    links = page.get_by_role("link", name="Preview").all()
    image, fake = [each.get_attribute("href") for each in links]
    page.goto(f"{visit.base}{image}")
    assert page.evaluate("document.images[0].naturalWidth") == 1
    shown = page.goto(f"{visit.base}{fake}")
    assert shown is not None
    assert shown.headers["content-type"] == "image/png"
    assert "sandbox" in shown.headers["content-security-policy"]
    assert page.evaluate("window.attacked") is None


def _preview(visit: Visit, task: str) -> str:
    visit.open(f"/tasks/{task}")
    found = visit.page.get_by_role("link", name="Preview").get_attribute("href")
    assert found is not None
    return found


def test_pages_are_not_shown_in_frames(bare_visit: Visit) -> None:
    page = bare_visit.page
    page.route(
        "http://evil.example/**",
        lambda route: (
            route.fulfill(
                content_type="text/html",
                body=f'<iframe src="{bare_visit.base}/sign-in"></iframe><iframe src="/own"></iframe>',
            )
            if route.request.url.endswith("/page")
            else route.fulfill(content_type="text/html", body="<h1>own</h1>")
        ),
    )
    page.goto("http://evil.example/page")
    frames = {frame.url: frame for frame in page.frames}
    expect(page.frame_locator("iframe >> nth=1").locator("h1")).to_have_text("own")  # the control
    assert not any(url.endswith("/sign-in") for url in frames)
