"""Wallets in chromium: a provider that announces itself by EIP-6963 and signs with a real key (EIP-1193)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
from playwright.sync_api import Browser, expect

from gpool.wallet.signing import WalletKey
from tests.browser.conftest import Visit
from tests.browser.test_walk import _findings
from tests.tools.processes import Pool

PROVIDER = """(() => {
  const request = async ({method, params}) => {
    const {result, error} = await window.askWallet(method, params || []);
    if (error) throw Object.assign(new Error(error.message), {code: error.code});
    return result;
  };
  const icon = "data:image/svg+xml,<svg xmlns='http://www.w3.org/2000/svg'/>";
  const info = {uuid: "350670db-19fa-4704-a166-e52e178b59d2", name: "Test Wallet", icon, rdns: "example.wallet"};
  const detail = Object.freeze({info, provider: {request}});
  const announce = () => dispatchEvent(new CustomEvent("eip6963:announceProvider", {detail}));
  addEventListener("eip6963:requestProvider", announce);
  announce();
})()"""


@dataclass
class Wallet:
    """Answers as a wallet does; `refusals` are errors by method."""

    key: WalletKey
    chain: int = 1
    refusals: dict[str, dict[str, Any]] = field(default_factory=dict)
    signed: list[str] = field(default_factory=list)

    def ask(self, method: str, parameters: list[Any]) -> dict[str, Any]:
        if method in self.refusals:
            return {"error": self.refusals[method]}
        match method:
            case "eth_requestAccounts":
                return {"result": [self.key.address.lower()]}
            case "eth_chainId":
                return {"result": hex(self.chain)}
            case "personal_sign":
                text = bytes.fromhex(parameters[0][2:])
                self.signed.append(text.decode())
                return {"result": str(self.key.sign(text))}
        return {"error": {"code": 4200, "message": f"{method} is not supported"}}


@pytest.fixture(params=[1280, 380], ids=["wide", "phone"])
def tab(request: pytest.FixtureRequest, chromium: Browser, pool: Pool) -> Iterator[Visit]:
    size: Any = {"width": request.param, "height": 800}
    with chromium.new_context(viewport=size, bypass_csp=False) as context:
        yield Visit(context.new_page(), pool.address)


def with_wallet(visit: Visit, wallet: Wallet) -> None:
    visit.page.expose_function("askWallet", wallet.ask)
    visit.page.add_init_script(PROVIDER)


def test_a_wallet_signs_in_on_the_page(tab: Visit) -> None:
    width = tab.page.viewport_size["width"]  # type: ignore[index]
    wallet = Wallet(WalletKey((1000 + width).to_bytes(32, "big")))
    with_wallet(tab, wallet)
    page = tab.page
    tab.open("/sign-in?next=/account")
    page.get_by_text("Sign in with a wallet").click()
    page.get_by_role("button", name="Test Wallet").click()
    page.wait_for_url("**/account")
    expect(page.locator("main")).to_contain_text(wallet.key.address)
    [message] = wallet.signed
    assert message.startswith(tab.base.partition("://")[2] + " wants you to sign in")
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    assert tab.faults == []


def test_a_wallet_is_linked_on_the_account_page(tab: Visit, pool: Pool) -> None:
    width = tab.page.viewport_size["width"]  # type: ignore[index]
    name, password = f"linker{width}", "a long enough password"
    pool.ask("POST", "/v1/users", {"name": name, "password": password})
    wallet = Wallet(WalletKey((2000 + width).to_bytes(32, "big")))
    with_wallet(tab, wallet)
    page = tab.page
    tab.open("/sign-in?next=/account")
    page.get_by_label("Name").first.fill(name)
    page.get_by_label("Password").first.fill(password)
    page.get_by_role("button", name="Sign in", exact=True).click()
    page.wait_for_url("**/account")
    page.get_by_text("Link a wallet").click()
    page.locator("[data-wallets]").get_by_label("Password").fill(password)
    page.get_by_role("button", name="Test Wallet").click()
    page.wait_for_url("**/account?done=wallet")
    expect(page.locator("main")).to_contain_text(wallet.key.address)
    assert f"Link this wallet to gpool account {name}." in wallet.signed[0]
    assert tab.faults == []


@pytest.mark.parametrize(
    ("wallet", "text"),
    [
        (Wallet(WalletKey(b"\1" * 32), refusals={"personal_sign": {"code": 4001, "message": "no"}}), "you declined"),
        (Wallet(WalletKey(b"\1" * 32), refusals={"eth_requestAccounts": {"code": -32002, "message": "busy"}}), "already waits"),
        (Wallet(WalletKey(b"\1" * 32), chain=137), "the wallet is on chain 137, this pool uses chain 1"),
    ],
    ids=["declined", "pending", "wrong-chain"],
)  # fmt: skip
def test_a_refusal_of_the_wallet_is_explained(bare_visit: Visit, wallet: Wallet, text: str) -> None:
    with_wallet(bare_visit, wallet)
    page = bare_visit.page
    bare_visit.open("/sign-in")
    page.get_by_text("Sign in with a wallet").click()
    page.get_by_role("button", name="Test Wallet").click()
    expect(page.locator("[data-wallets] [role=status]")).to_contain_text(text)
    assert wallet.signed == []
    assert bare_visit.faults == []


def test_a_browser_without_a_wallet_is_told_what_to_do(bare_visit: Visit) -> None:
    page = bare_visit.page
    bare_visit.open("/sign-in")
    page.get_by_text("Sign in with a wallet").click()
    status = page.locator("[data-wallets] [role=status]")
    expect(status).to_contain_text("No wallet was found in this browser")
    expect(status).to_contain_text("gpool login --wallet")


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_list_of_wallets_has_no_serious_accessibility_finding(
    chromium: Browser, pool: Pool, require: Callable[[str], None], scheme: Any
) -> None:
    require("axe-core")
    with chromium.new_context(color_scheme=scheme, bypass_csp=True) as context:
        visit = Visit(context.new_page(), pool.address)
        with_wallet(visit, Wallet(WalletKey(b"\1" * 32)))
        visit.open("/sign-in")
        visit.page.get_by_text("Sign in with a wallet").click()
        expect(visit.page.get_by_role("button", name="Test Wallet")).to_be_visible()
        assert _findings(visit) == []
