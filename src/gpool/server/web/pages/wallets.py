"""Wallets in the page: sign-in, and linking one to the account. The page's script asks the wallet (`static/wallets.js`).

Messages are for the public origin only: a server that accepted signatures for every address under which it is reached
could be sent those that a hostile pool collected at its own address.
"""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from gpool.core.errors import GpoolError, Invalid
from gpool.core.permissions import Action
from gpool.server.actions.accounts import sessions, wallets
from gpool.server.api.callers import address_of, server_of
from gpool.server.identity.throttle import RouteClass
from gpool.server.web.origins import safe_next
from gpool.server.web.pages.account import account_page
from gpool.server.web.pages.sign_in import browser_label, sign_in_page, signed_in
from gpool.server.web.routing import PageRouter, see
from gpool.server.web.visitors import (
    form_of,
    is_public_origin,
    require_same_origin,
    validated,
    visitor,
)
from gpool.wallet.signin import WalletPurpose
from gpool.wire.identity import WalletLink, WalletSignIn

routes = PageRouter("pages")

MAX_ADDRESS = 80


@routes.form("/sign-in/wallet/message", Action.SIGN_IN_PROVE, rate=RouteClass.SIGN_IN)
async def write_sign_in_message(request: Request) -> Response:
    """Write the message that a wallet signs to sign in."""
    require_same_origin(request)
    return await _message(request, WalletPurpose.SIGN_IN)


@routes.form("/sign-in/wallet", Action.SIGN_IN, Action.REGISTER, rate=RouteClass.SIGN_IN)
async def sign_in_by_wallet(request: Request) -> Response:
    """Sign in with a signed message; the first sign-in of a wallet creates its account."""
    require_same_origin(request)
    form = await form_of(request)
    target = safe_next(form.text("next"))
    server, address = server_of(request), address_of(request)
    try:
        members = {
            "message": form.raw("message").replace("\r\n", "\n"),
            "signature": form.text("signature"),
            "invite": form.text("invite") or None,
        }
        account = await wallets.account_of(server, validated(WalletSignIn, members), address)
        cookie = await sessions.open_browser_session(
            server, account, browser_label(request), address, "wallet"
        )
    except GpoolError as error:
        return sign_in_page(request, target, error)
    return signed_in(request, target, cookie)


@routes.form("/account/wallets/message", Action.WALLET_LINK, rate=RouteClass.SIGN_IN)
async def write_link_message(request: Request) -> Response:
    """Write the message that a wallet signs to be linked to the visitor's account."""
    who = await visitor(request)
    return await _message(request, WalletPurpose.LINK, who.user.name)


@routes.form("/account/wallets", Action.WALLET_LINK, rate=RouteClass.SIGN_IN)
async def link_wallet_on_page(request: Request) -> Response:
    """Link a wallet: takes its signature and the account's password."""
    who, form = await visitor(request), await form_of(request)
    try:
        members = {
            "message": form.raw("message").replace("\r\n", "\n"),
            "signature": form.text("signature"),
            "password": form.raw("password") or None,
        }
        await wallets.link(server_of(request), who, validated(WalletLink, members), None)
    except GpoolError as error:
        return await account_page(request, who, error.status, error=error)
    return see("/account?done=wallet")


async def _message(request: Request, purpose: WalletPurpose, account: str = "") -> Response:
    server = server_of(request)
    if not is_public_origin(request):
        raise Invalid(f"wallets sign for {server.settings.origin} only; open the page there")
    address = (await form_of(request)).text("address")[:MAX_ADDRESS]
    members = {
        "message": await wallets.message(server, address, purpose, account),
        "chain_id": server.settings.chain_id,
    }
    return JSONResponse(members, headers={"Cache-Control": "no-store"})
