"""An identity provider in chromium: from the sign-in page to the provider and back."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser, expect

from tests.browser.conftest import Visit
from tests.tools.oidc_provider import oidc_provider
from tests.tools.processes import Pool


@pytest.mark.parametrize("width", [1280, 380], ids=["wide", "phone"])
def test_a_providers_account_signs_in_on_the_page(
    chromium: Browser, tmp_path: Path, width: int
) -> None:
    with oidc_provider() as issuer:
        known = {"name": "mock", "issuer": issuer, "client_id": "gpool", "client_secret": "hush"}
        pool = Pool(tmp_path, {"GPOOL_SERVER_OIDC": json.dumps([known])})
        size: Any = {"width": width, "height": 800}
        try:
            pool.start(agents=())
            with chromium.new_context(viewport=size) as context:
                visit = Visit(context.new_page(), pool.address)
                page = visit.page
                visit.open("/account")
                page.get_by_role("button", name="Sign in with mock").click()
                page.wait_for_url(f"{issuer}/**")
                page.locator("input[name=sub]").fill("ada")
                page.wait_for_load_state("networkidle")
                visit.faults.clear()  # of the provider's page, which loads a style of another site
                page.get_by_role("button", name="Authorize").first.click()
                page.wait_for_url(f"{pool.address}/account")
                expect(page.locator("h1")).to_contain_text("mock-")
                assert visit.faults == []
        finally:
            pool.stop()
