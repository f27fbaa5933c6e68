"""From the sign-in to a result, at two widths, in light and dark, by keyboard, without scripts; no serious axe finding."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from playwright.sync_api import Browser, expect

from tests.browser.conftest import Visit
from tests.tools.components import AXE
from tests.tools.processes import Pool

COMMAND = """python -c "import os,time; open('r.txt','w').write('done'); [print('step', i, flush=True) or time.sleep(.2) for i in range(15)]" """
PAGES = ("/", "/tasks", "/tasks/new", "/nodes", "/account", "/admin?verify=1")


def test_a_task_goes_from_the_form_to_its_result(visit: Visit) -> None:
    page = visit.page
    expect(page.locator("#live")).to_have_text("live")
    expect(page.locator(".gpu").first).to_contain_text("H100")
    page.get_by_role("link", name="New task").first.click()
    page.get_by_label("Command", exact=True).fill(COMMAND)
    page.get_by_label("Files to keep").fill("r.txt")
    page.get_by_label("H100 80 GB").check()
    expect(page.locator("#quote")).to_contain_text("starts now")
    expect(page.locator("#quote")).to_contain_text("gpool run --gpu H100")
    page.get_by_role("button", name="Submit task").click()
    expect(page.locator("#log")).to_contain_text("step 3")  # live: the page was opened before
    expect(page.locator("#state")).to_contain_text("succeeded")
    expect(page.locator("#log")).to_contain_text("step 14")
    with page.expect_download() as download:
        page.locator("#results").get_by_role("link", name="r.txt").click()
    assert download.value.path().read_text() == "done"
    assert page.evaluate("document.documentElement.scrollWidth") <= page.viewport_size["width"]  # type: ignore[index]


def test_the_pool_page_changes_in_place(visit: Visit, pool: Pool) -> None:
    page = visit.page
    expect(page.locator("#live")).to_have_text("live")
    page.evaluate("document.querySelector('.gpu').dataset.kept = 'yes'")
    expect(page.locator(".gpu .busy")).to_have_count(0)
    task = pool.ask("POST", "/v1/tasks", {"command": ["sleep", "60"], "gpu": "H100"})
    expect(page.locator(".gpu .busy").first).to_be_visible()
    assert (
        page.locator(".gpu[data-kept=yes]").count() <= 1
    )  # the same element, or its attribute morphed
    pool.ask("DELETE", f"/v1/tasks/{task.json()['ids'][0]}")
    expect(page.locator(".gpu .busy")).to_have_count(0)


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_no_page_has_a_serious_accessibility_finding(
    chromium: Browser, pool: Pool, require: Callable[[str], None], scheme: str
) -> None:
    require("axe-core")
    with chromium.new_context(color_scheme=scheme, bypass_csp=True) as context:  # type: ignore[arg-type]
        visit = Visit(context.new_page(), pool.address)
        visit.open("/sign-in")
        found = _findings(visit)
        visit.sign_in(pool)
        task = pool.ask("POST", "/v1/tasks", {"command": ["true"]}).json()["ids"][0]
        me = pool.ask("GET", "/v1/me").json()["id"]
        for path in (*PAGES, f"/tasks/{task}", f"/admin/users/{me}", "/reset"):
            visit.open(path)
            found += _findings(visit)
    assert found == []


def _findings(visit: Visit) -> list[str]:
    visit.page.add_script_tag(path=AXE)
    violations = visit.page.evaluate("axe.run().then(found => found.violations)")
    return [
        f"{visit.page.url} {each['id']}: {each['nodes'][0]['html'][:150]}"
        for each in violations
        if each["impact"] in ("serious", "critical")
    ]


def test_a_keyboard_reaches_the_content_and_the_form(visit: Visit) -> None:
    page = visit.page
    page.keyboard.press("Tab")
    expect(page.locator(":focus")).to_have_text("Skip to the content")
    page.keyboard.press("Enter")
    assert page.evaluate("document.activeElement.id") == "main"


def test_pages_work_without_scripts(chromium: Browser, pool: Pool) -> None:
    with chromium.new_context(java_script_enabled=False) as context:
        visit = Visit(context.new_page(), pool.address)
        page = visit.page
        visit.open(pool.ask("POST", "/v1/auth/links", {}).json()["path"])
        page.get_by_role("button", name="Open the pool").click()
        expect(page.locator(".gpu").first).to_contain_text("H100")
        visit.open("/tasks/new")
        page.get_by_label("Command", exact=True).fill("echo without scripts")
        page.get_by_role("button", name="Submit task").click()
        page.wait_for_url("**/tasks/t-*")
        pool.ask("GET", f"/v1/tasks/{page.url.rpartition('/')[2]}?wait=60")
        page.reload()
        expect(page.locator("#log")).to_contain_text("without scripts")
        assert visit.faults == []


def test_a_password_signs_in_and_out(bare_visit: Visit) -> None:
    page = bare_visit.page
    bare_visit.open("/tasks")
    page.wait_for_url("**/sign-in?next=/tasks")
    page.get_by_text("Create an account").click()
    form = page.locator("details form")
    form.get_by_label("Name").fill("grace")
    form.get_by_label("Password at least").fill("a long enough password")
    form.get_by_label("Password again").fill("a long enough password")
    form.get_by_role("button").click()
    page.wait_for_url("**/tasks")
    expect(page.locator("main")).to_contain_text("No task here yet")
    page.get_by_role("button", name="Sign out").click()
    page.wait_for_url("**/sign-in")
    page.get_by_label("Name").first.fill("grace")
    page.get_by_label("Password").first.fill("a long enough password")
    page.get_by_role("button", name="Sign in").click()
    page.wait_for_url(f"{bare_visit.base}/")
