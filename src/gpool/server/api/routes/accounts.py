"""Routes of coming in and of one's own account: registering, sign-ins, sessions, wallets, API keys."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Path
from starlette.requests import Request
from starlette.responses import Response

from gpool.core.errors import Forbidden
from gpool.core.ids import decode
from gpool.core.permissions import POOL, Action
from gpool.server.actions.accounts import accounts, keys, oidc, sessions, wallets
from gpool.server.api.openapi import Responses, body, ok
from gpool.server.api.requests import (
    address_of,
    body_of,
    caller_if_any,
    once_of,
    parsed,
    server_of,
    user_of,
)
from gpool.server.api.responses import answer, tagged
from gpool.server.identity.authorization import permit
from gpool.server.store.identity_values import Caller
from gpool.wire.identity import (
    JwksDocument,
    KeyMade,
    KeyPage,
    KeyRequest,
    MeDocument,
    NonceDocument,
    OidcFinish,
    OidcStarted,
    PasswordChange,
    PasswordSignIn,
    RefreshRequest,
    SessionPage,
    SignOutRequest,
    TokensDocument,
    UserDocument,
    UserRequest,
    WalletDocument,
    WalletLink,
    WalletPage,
    WalletPatch,
    WalletSignIn,
    WalletUnlink,
)

router = APIRouter(tags=["accounts"])

KEY = Annotated[str, Path(description="An API key's id, k-…")]
SESSION = Annotated[str, Path(description="A session's id", max_length=64)]
WALLET = Annotated[str, Path(description="A wallet's address, 0x…")]
_MADE: Responses = {201: {"model": UserDocument, "description": "Made"}}
_NO_STORE = {"Cache-Control": "no-store"}


def _secret(document: TokensDocument | KeyMade | NonceDocument, status: int = 200) -> Response:
    """What no cache on the way may keep."""
    made = answer(document, status)
    made.headers.update(_NO_STORE)
    return made


def _label(request: Request) -> str:
    return request.headers.get("user-agent", "")


# ---- coming in


@router.post(
    "/v1/users",
    status_code=201,
    openapi_extra=body(UserRequest),
    responses=_MADE,
    response_class=Response,
)
async def register(request: Request) -> Response:
    """A new account with a password, where registration is open or with an invite."""
    wanted = parsed(UserRequest, await body_of(request))
    return answer(await accounts.register(server_of(request), wanted), 201)


@router.post(
    "/v1/auth/password",
    openapi_extra=body(PasswordSignIn),
    responses=ok(TokensDocument),
    response_class=Response,
)
async def sign_in_by_password(request: Request) -> Response:
    """Sign in with name and password."""
    wanted = parsed(PasswordSignIn, await body_of(request))
    found = await sessions.by_password(
        server_of(request), wanted.name, wanted.password, _label(request), address_of(request)
    )
    return _secret(found)


@router.post("/v1/auth/wallet/nonce", responses=ok(NonceDocument), response_class=Response)
async def wallet_nonce(request: Request) -> Response:
    """What the next sign-in message must hold."""
    return _secret(await wallets.nonce(server_of(request)))


@router.post(
    "/v1/auth/wallet",
    openapi_extra=body(WalletSignIn),
    responses=ok(TokensDocument),
    response_class=Response,
)
async def sign_in_by_wallet(request: Request) -> Response:
    """Sign in with Ethereum (EIP-4361). The first time makes the account."""
    wanted = parsed(WalletSignIn, await body_of(request))
    return _secret(
        await wallets.sign_in(server_of(request), wanted, _label(request), address_of(request))
    )


@router.get("/v1/auth/oidc/start", responses=ok(OidcStarted), response_class=Response)
async def oidc_start(request: Request, redirect_uri: str, provider: str = "") -> Response:
    """Where to sign in with somebody else's account (OpenID Connect)."""
    return answer(await oidc.start(server_of(request), provider, redirect_uri))


@router.post(
    "/v1/auth/oidc/finish",
    openapi_extra=body(OidcFinish),
    responses=ok(TokensDocument),
    response_class=Response,
)
async def oidc_finish(request: Request) -> Response:
    """The code and state that came back."""
    wanted = parsed(OidcFinish, await body_of(request))
    return _secret(
        await oidc.finish(server_of(request), wanted, _label(request), address_of(request))
    )


@router.post(
    "/v1/auth/refresh",
    openapi_extra=body(RefreshRequest),
    responses=ok(TokensDocument),
    response_class=Response,
)
async def refresh(request: Request) -> Response:
    """The next pair of tokens; the refresh token given is used up."""
    wanted = parsed(RefreshRequest, await body_of(request))
    return _secret(await sessions.refreshed(server_of(request), wanted.refresh_token))


@router.post(
    "/v1/auth/logout",
    status_code=204,
    openapi_extra=body(SignOutRequest, required=False),
    response_class=Response,
)
async def sign_out(request: Request) -> Response:
    """End the session of a refresh token, the one that asks, or all of the account."""
    who = await caller_if_any(request)
    if who is not None and not isinstance(who, Caller):
        raise Forbidden("not allowed: session.sign_out is for users, not for nodes")
    wanted = parsed(SignOutRequest, await body_of(request))
    await sessions.sign_out(server_of(request), who, wanted.refresh_token, wanted.everywhere)
    return Response(status_code=204)


@router.get("/.well-known/jwks.json", responses=ok(JwksDocument), response_class=Response)
async def jwks(request: Request) -> Response:
    """The public keys of our access tokens."""
    permit(None, Action.PUBLIC_KEYS_READ, POOL)
    server = server_of(request)
    document = JwksDocument.model_validate({"keys": server.identity.signing.jwks(server.now)})
    return tagged(request, document)


# ---- one's account


@router.get("/v1/me", responses=ok(MeDocument), response_class=Response)
async def me(request: Request) -> Response:
    """The account behind the key or token."""
    who = await user_of(request, Action.ME_READ)
    return tagged(request, await accounts.me(server_of(request), who))


@router.put(
    "/v1/me/password",
    status_code=204,
    openapi_extra=body(PasswordChange),
    response_class=Response,
)
async def change_password(request: Request) -> Response:
    """Set or change the password; every other sign-in of yours ends."""
    who = await user_of(request, Action.PASSWORD_CHANGE)
    content = await body_of(request)
    wanted = parsed(PasswordChange, content)
    await accounts.change_password(
        server_of(request), who, wanted.old, wanted.new, once_of(request, content)
    )
    return Response(status_code=204)


@router.get("/v1/sessions", responses=ok(SessionPage), response_class=Response)
async def list_sessions(request: Request) -> Response:
    """Where you are signed in, the last used first."""
    who = await user_of(request, Action.SESSIONS_LIST)
    return answer(SessionPage(items=await sessions.listed(server_of(request), who)))


@router.delete("/v1/sessions/{id}", status_code=204, response_class=Response)
async def end_session(request: Request, id: SESSION) -> Response:
    """Sign out there, within seconds."""
    who = await user_of(request, Action.SESSION_END)
    await sessions.end(server_of(request), who, id, once_of(request))
    return Response(status_code=204)


# ---- wallets


@router.get("/v1/wallets", responses=ok(WalletPage), response_class=Response)
async def list_wallets(request: Request) -> Response:
    who = await user_of(request, Action.ME_READ)
    return answer(WalletPage(items=await wallets.listed(server_of(request), who)))


@router.post(
    "/v1/wallets",
    status_code=201,
    openapi_extra=body(WalletLink),
    responses={201: {"model": WalletDocument, "description": "Linked"}},
    response_class=Response,
)
async def link_wallet(request: Request) -> Response:
    """Link a wallet: its signature, and a way in that the account has."""
    who = await user_of(request, Action.WALLET_LINK)
    content = await body_of(request)
    wanted = parsed(WalletLink, content)
    linked = await wallets.link(server_of(request), who, wanted, once_of(request, content))
    return answer(linked, 201)


@router.patch(
    "/v1/wallets/{address}",
    openapi_extra=body(WalletPatch),
    responses=ok(WalletDocument),
    response_class=Response,
)
async def change_wallet(request: Request, address: WALLET) -> Response:
    """Make it the wallet that earnings go to, or no longer."""
    who = await user_of(request, Action.PAYOUT_WALLET_SET)
    content = await body_of(request)
    payout = parsed(WalletPatch, content).payout
    changed = await wallets.set_payout(
        server_of(request), who, address, payout, once_of(request, content)
    )
    return answer(changed)


@router.delete(
    "/v1/wallets/{address}",
    status_code=204,
    openapi_extra=body(WalletUnlink),
    response_class=Response,
)
async def unlink_wallet(request: Request, address: WALLET) -> Response:
    """Unlink a wallet: its signature, and a way in that stays. The last way in cannot be removed."""
    who = await user_of(request, Action.WALLET_UNLINK)
    content = await body_of(request)
    wanted = parsed(WalletUnlink, content)
    await wallets.unlink(server_of(request), who, address, wanted, once_of(request, content))
    return Response(status_code=204)


# ---- API keys


@router.get("/v1/keys", responses=ok(KeyPage), response_class=Response)
async def list_keys(request: Request) -> Response:
    """Newest first, the ended ones too."""
    who = await user_of(request, Action.KEYS_LIST)
    return answer(KeyPage(items=await keys.listed(server_of(request), who)))


@router.post(
    "/v1/keys",
    status_code=201,
    openapi_extra=body(KeyRequest),
    responses={201: {"model": KeyMade, "description": "Made; the key is shown this once"}},
    response_class=Response,
)
async def make_key(request: Request) -> Response:
    """A key for programs: named, scoped, expiring. Needs a sign-in."""
    who = await user_of(request, Action.KEY_MAKE)
    content = await body_of(request)
    wanted = parsed(KeyRequest, content)
    return _secret(await keys.make(server_of(request), who, wanted, once_of(request, content)), 201)


@router.delete("/v1/keys/{id}", status_code=204, response_class=Response)
async def end_key(request: Request, id: KEY) -> Response:
    """The key opens nothing any more, within seconds."""
    who = await user_of(request, Action.KEY_END)
    await keys.end(server_of(request), who, decode("key", id), once_of(request))
    return Response(status_code=204)
