"""Routes of accounts: registration, sign-in, sessions, wallets, API keys."""

from __future__ import annotations

from typing import Annotated

from fastapi import Path
from starlette.requests import Request
from starlette.responses import Response

from gpool.core.ids import decode
from gpool.core.permissions import Action
from gpool.server.actions.accounts import (
    accounts,
    export,
    oidc,
    removal,
    sessions,
    sign_in_links,
    wallets,
)
from gpool.server.api.callers import (
    address_of,
    caller_if_any,
    check,
    credential_was_valid,
    server_of,
    user_of,
)
from gpool.server.api.endpoints import NO_CONTENT, EndpointRouter, SuccessReply, created
from gpool.server.api.messages import (
    answer,
    document_of,
    no_content,
    once_of,
    stream,
    tagged,
    uncached,
)
from gpool.server.identity.throttle import RouteClass
from gpool.server.overload.admission import LoadClass
from gpool.server.store.values import NodeCredentials
from gpool.wallet.signin import WalletPurpose
from gpool.wire.identity import (
    AccountDeletion,
    KeyMade,
    KeyPage,
    KeyRequest,
    MeDocument,
    NonceDocument,
    NonceRequest,
    OidcFinish,
    OidcStarted,
    PasswordChange,
    PasswordSignIn,
    RefreshRequest,
    SessionPage,
    SignInLinkDocument,
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

routes = EndpointRouter("accounts")

KEY = Annotated[str, Path(description="API key id, k-…")]
SESSION = Annotated[str, Path(description="Session id", max_length=64)]
WALLET = Annotated[str, Path(description="Wallet address, 0x…")]
SIGN_IN = RouteClass.SIGN_IN
NDJSON = "application/x-ndjson"


def _label(request: Request) -> str:
    return request.headers.get("user-agent", "")


# ---- registration and sign-in


@routes.post(
    "/v1/users",
    Action.REGISTER,
    rate=RouteClass.REGISTER,
    body=UserRequest,
    returns=created(UserDocument),
    problems=(403, 409),
)
async def register_user(request: Request) -> Response:
    """Register an account with a password, where registration is open, or with an invite."""
    wanted, _ = await document_of(request, UserRequest)
    return answer(await accounts.register(server_of(request), wanted), 201)


@routes.post(
    "/v1/auth/password",
    Action.SIGN_IN,
    rate=SIGN_IN,
    body=PasswordSignIn,
    returns=TokensDocument,
    problems=(401, 403),
)
async def sign_in_with_password(request: Request) -> Response:
    """Sign in with name and password."""
    wanted, _ = await document_of(request, PasswordSignIn)
    found = await sessions.sign_in_with_password(
        server_of(request), wanted.name, wanted.password, _label(request), address_of(request)
    )
    credential_was_valid(request)
    return uncached(found)


@routes.post(
    "/v1/auth/wallet/nonce",
    Action.SIGN_IN_PROVE,
    rate=SIGN_IN,
    body=NonceRequest,
    is_body_required=False,
    returns=NonceDocument,
)
async def create_wallet_nonce(request: Request) -> Response:
    """Get the nonce that the next message signed by a wallet must contain, for one purpose."""
    wanted, _ = await document_of(request, NonceRequest)
    return uncached(await wallets.nonce(server_of(request), WalletPurpose(wanted.purpose)))


@routes.post(
    "/v1/auth/wallet",
    Action.SIGN_IN,
    Action.REGISTER,
    rate=SIGN_IN,
    body=WalletSignIn,
    returns=TokensDocument,
    problems=(401, 403),
)
async def sign_in_with_wallet(request: Request) -> Response:
    """Sign in with Ethereum (EIP-4361). The first sign-in creates the account."""
    wanted, _ = await document_of(request, WalletSignIn)
    found = await wallets.sign_in(server_of(request), wanted, _label(request), address_of(request))
    credential_was_valid(request)
    return uncached(found)


@routes.get(
    "/v1/auth/oidc/start",
    Action.SIGN_IN_BEGIN,
    rate=SIGN_IN,
    returns=OidcStarted,
    problems=(400, 404),
)
async def start_oidc(request: Request, redirect_uri: str, provider: str = "") -> Response:
    """Begin a sign-in with an OpenID Connect provider: get the URL to open in a browser."""
    return answer(await oidc.start(server_of(request), provider, redirect_uri))


@routes.post(
    "/v1/auth/oidc/finish",
    Action.SIGN_IN,
    Action.REGISTER,
    rate=SIGN_IN,
    body=OidcFinish,
    returns=TokensDocument,
    problems=(401, 403),
)
async def finish_oidc(request: Request) -> Response:
    """Finish a sign-in with the `code` and `state` that the provider returned."""
    wanted, _ = await document_of(request, OidcFinish)
    found = await oidc.finish(server_of(request), wanted, _label(request), address_of(request))
    credential_was_valid(request)
    return uncached(found)


@routes.post("/v1/auth/links", Action.SIGN_IN_LINK, returns=created(SignInLinkDocument))
async def create_sign_in_link(request: Request) -> Response:
    """Create a link that opens the page signed in as you, once, in a browser on the server's machine. For operators."""
    who = await user_of(request)
    return uncached(await sign_in_links.create(server_of(request), who), 201)


@routes.post(
    "/v1/auth/refresh",
    Action.REFRESH,
    rate=RouteClass.REFRESH,
    body=RefreshRequest,
    returns=TokensDocument,
    problems=(401,),
)
async def refresh_tokens(request: Request) -> Response:
    """Exchange a refresh token for the next pair of tokens; it can be used once."""
    wanted, _ = await document_of(request, RefreshRequest)
    found = await sessions.refresh_tokens(server_of(request), wanted.refresh_token)
    credential_was_valid(request)
    return uncached(found)


@routes.post(
    "/v1/auth/logout",
    Action.SIGN_OUT,
    rate=SIGN_IN,
    body=SignOutRequest,
    is_body_required=False,
    returns=NO_CONTENT,
)
async def sign_out(request: Request) -> Response:
    """End the session of a refresh token, the calling session, or all sessions of the account."""
    who = await caller_if_any(request)
    wanted, _ = await document_of(request, SignOutRequest)
    if isinstance(who, NodeCredentials) or wanted.refresh_token is None:
        check(request, who)
    assert not isinstance(who, NodeCredentials), "nodes have no sessions"
    await sessions.sign_out(server_of(request), who, wanted.refresh_token, wanted.everywhere)
    return no_content()


# ---- the caller's account


@routes.get("/v1/me", Action.ME_READ, returns=MeDocument)
async def get_me(request: Request) -> Response:
    """Read the account behind the key or token."""
    who = await user_of(request)
    return tagged(request, await accounts.me(server_of(request), who))


@routes.delete(
    "/v1/me",
    Action.ACCOUNT_DELETE,
    rate=SIGN_IN,
    body=AccountDeletion,
    returns=NO_CONTENT,
)
async def delete_me(request: Request) -> Response:
    """Delete your account: sessions and keys end, tasks are cancelled and deleted, nodes are removed."""
    who = await user_of(request)
    wanted, _ = await document_of(request, AccountDeletion)
    await removal.delete_account(server_of(request), who, wanted)
    return no_content()


@routes.get(
    "/v1/me/export",
    Action.ACCOUNT_EXPORT,
    rate=RouteClass.STREAM,
    load=LoadClass.LISTING,
    returns=SuccessReply(
        description="One JSON object a line, with `kind`: account, key, session, node, webhook, notice, "
        "ledger_entry, artifact, task, log. "
        "`Accept: text/plain` selects the second media type, with the same content",
        media_types=(NDJSON, "text/plain"),
    ),
)
async def export_me(request: Request) -> Response:
    """Export the data of your account: tasks with arguments, results and logs, settings, and the list of artifacts."""
    who = await user_of(request)
    is_text = "text/plain" in request.headers.get("accept", "")
    lines = await export.lines(server_of(request), who)
    return stream(lines, "text/plain" if is_text else NDJSON)


@routes.put(
    "/v1/me/password",
    Action.PASSWORD_CHANGE,
    rate=SIGN_IN,
    body=PasswordChange,
    returns=NO_CONTENT,
)
async def change_password(request: Request) -> Response:
    """Set or change your password; all your other sessions end."""
    who = await user_of(request)
    wanted, once = await document_of(request, PasswordChange)
    await accounts.change_password(server_of(request), who, wanted.old, wanted.new, once)
    return no_content()


@routes.get("/v1/sessions", Action.SESSIONS_LIST, returns=SessionPage)
async def list_sessions(request: Request) -> Response:
    """List your sessions, the last used first."""
    who = await user_of(request)
    return answer(SessionPage(items=await sessions.list_sessions(server_of(request), who)))


@routes.delete("/v1/sessions/{id}", Action.SESSION_END, returns=NO_CONTENT)
async def end_session(request: Request, id: SESSION) -> Response:
    """End a session; its tokens stop working within seconds."""
    who = await user_of(request)
    await sessions.end_session(server_of(request), who, id, once_of(request))
    return no_content()


# ---- wallets


@routes.get("/v1/wallets", Action.ME_READ, returns=WalletPage)
async def list_wallets(request: Request) -> Response:
    """List the wallets linked to your account."""
    who = await user_of(request)
    return answer(WalletPage(items=await wallets.list_wallets(server_of(request), who)))


@routes.post(
    "/v1/wallets",
    Action.WALLET_LINK,
    rate=SIGN_IN,
    body=WalletLink,
    returns=created(WalletDocument, "Linked"),
)
async def link_wallet(request: Request) -> Response:
    """Link a wallet: takes the wallet's signature and a credential the account already has."""
    who = await user_of(request)
    wanted, once = await document_of(request, WalletLink)
    return answer(await wallets.link(server_of(request), who, wanted, once), 201)


@routes.patch(
    "/v1/wallets/{address}", Action.PAYOUT_WALLET_SET, body=WalletPatch, returns=WalletDocument
)
async def change_wallet(request: Request, address: WALLET) -> Response:
    """Make a wallet the payout wallet for your earnings, or stop using it as such."""
    who = await user_of(request)
    wanted, once = await document_of(request, WalletPatch)
    return answer(await wallets.set_payout(server_of(request), who, address, wanted.payout, once))


@routes.delete(
    "/v1/wallets/{address}",
    Action.WALLET_UNLINK,
    rate=SIGN_IN,
    body=WalletUnlink,
    returns=NO_CONTENT,
)
async def unlink_wallet(request: Request, address: WALLET) -> Response:
    """Unlink a wallet: takes its signature and a credential that remains. The last credential stays."""
    who = await user_of(request)
    wanted, once = await document_of(request, WalletUnlink)
    await wallets.unlink(server_of(request), who, address, wanted, once)
    return no_content()


# ---- API keys


@routes.get("/v1/keys", Action.KEYS_LIST, returns=KeyPage)
async def list_keys(request: Request) -> Response:
    """List your API keys, newest first, revoked keys included."""
    who = await user_of(request)
    return answer(KeyPage(items=await accounts.list_keys(server_of(request), who)))


@routes.post(
    "/v1/keys",
    Action.KEY_MAKE,
    body=KeyRequest,
    returns=created(KeyMade, "Created; the key is shown only in this answer"),
)
async def create_key(request: Request) -> Response:
    """Create an API key with a name, scopes and an expiry. Needs a sign-in."""
    who = await user_of(request)
    wanted, once = await document_of(request, KeyRequest)
    return uncached(await accounts.create_key(server_of(request), who, wanted, once), 201)


@routes.delete("/v1/keys/{id}", Action.KEY_END, returns=NO_CONTENT)
async def revoke_key(request: Request, id: KEY) -> Response:
    """Revoke an API key; it stops working within seconds."""
    who = await user_of(request)
    await accounts.revoke_key(server_of(request), who, decode("key", id), once_of(request))
    return no_content()
