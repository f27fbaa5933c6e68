"""Sign-in with an OpenID Connect provider: code flow with PKCE, providers by discovery.

`state` carries the sealed flow state, so any replica can finish it; its nonce is stored and works once. Redirects
lead only to this server or to a loopback address (the command line).
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
import json
import secrets
from dataclasses import asdict, dataclass
from urllib.parse import urlsplit

from gpool.core.errors import Conflict, GpoolError, Invalid, NotFound, NotSignedIn
from gpool.core.model import Instant
from gpool.server.actions.accounts import accounts, sessions
from gpool.server.actions.accounts.accounts import FirstCredential
from gpool.server.identity import oidc
from gpool.server.identity.authorization import hashed
from gpool.server.identity.envelope import FieldLocation
from gpool.server.identity.oidc import (
    ExpectedClaims,
    OidcProvider,
    ProviderEndpoints,
    ProviderIdentity,
)
from gpool.server.server import Server
from gpool.server.settings import span
from gpool.server.store.identity_values import Account
from gpool.server.store.operations.identity import accounts as operations
from gpool.transfer.requests import is_loopback, origin_of
from gpool.wire.identity import OidcFinish, OidcStarted, TokensDocument

NONCE_PURPOSE = "oidc"
_STATE = FieldLocation("oidc", "state", "sealed")


@dataclass(frozen=True, slots=True)
class _OidcFlow:
    provider: str
    nonce: str
    verifier: str
    redirect_uri: str
    expires_at: int
    browser: str = ""  # hash of the secret in the browser's cookie; empty: not begun in a page
    next: str = ""  # path of this server to open after the sign-in
    invite: str | None = None


@dataclass(frozen=True, slots=True)
class BrowserFlow:
    """A sign-in begun in a page. `secret` is in a cookie, so that no other browser can finish it."""

    secret: str
    next: str
    invite: str | None = None


@dataclass(frozen=True, slots=True)
class ProviderSignIn:
    account: Account
    provider: str
    next: str


async def start(
    server: Server, provider: str, redirect_uri: str, browser: BrowserFlow | None = None
) -> OidcStarted:
    configured = _configured(server, provider)
    if not _may_redirect_to(server, redirect_uri):
        raise Invalid(
            f"'redirect_uri' {redirect_uri[:200]!r} is neither on this server nor on a loopback address"
        )
    found = await _discovered(server, configured)
    expires_at = Instant(server.now + span(server.settings.nonce_s))
    flow = _OidcFlow(
        configured.name,
        secrets.token_urlsafe(24),
        secrets.token_urlsafe(48),
        redirect_uri,
        expires_at,
        *(() if browser is None else (hashed(browser.secret), browser.next, browser.invite)),
    )
    await server.write(operations.put_nonce(flow.nonce, NONCE_PURPOSE, expires_at))
    sealed = await server.identity.sealer.seal(_STATE, json.dumps(asdict(flow)).encode())
    state = base64.urlsafe_b64encode(sealed).decode()
    url = oidc.authorization_url(
        found,
        {
            "response_type": "code",
            "client_id": configured.client_id,
            "redirect_uri": redirect_uri,
            "scope": configured.scope,
            "state": state,
            "nonce": flow.nonce,
            "code_challenge": oidc.challenge_of(flow.verifier),
            "code_challenge_method": "S256",
        },
    )
    return OidcStarted(url=url, state=state, provider=configured.name)


async def finish(
    server: Server, request: OidcFinish, label: str, address: str = ""
) -> TokensDocument:
    found = await account_of(server, request)
    via = f"oidc {found.provider}"
    return await sessions.open_session(server, found.account, label, address, via)


async def account_of(server: Server, request: OidcFinish, secret: str = "") -> ProviderSignIn:
    """Account that the provider names. `secret`: of the browser that began the sign-in in a page."""
    flow = await _opened(server, request.state)
    if not hmac.compare_digest(flow.browser, hashed(secret) if secret else ""):
        raise NotSignedIn("this sign-in was begun in another browser; start again")
    configured = _configured(server, flow.provider)
    if not await server.write(operations.take_nonce(flow.nonce, NONCE_PURPOSE, server.now)):
        raise NotSignedIn("this sign-in was already finished, or it expired; start again")
    identity = await _identity(server, configured, flow, request.code)
    account = await server.store.read(operations.user_by_oidc(identity.issuer, identity.subject))
    if account is None:
        invite = request.invite or flow.invite
        accounts.may_register(server, invite)
        account = await _first(server, configured, identity, invite)
    return ProviderSignIn(account, configured.name, flow.next)


async def _identity(
    server: Server, configured: OidcProvider, flow: _OidcFlow, code: str
) -> ProviderIdentity:
    provider = await _discovered(server, configured)
    form = {
        "grant_type": "authorization_code",
        "code": code,
        "redirect_uri": flow.redirect_uri,
        "client_id": configured.client_id,
        "code_verifier": flow.verifier,
    }
    secret = configured.client_secret
    auth = None if secret is None else (configured.client_id, secret.get_secret_value())
    outbound = server.identity.outbound
    answer = await outbound.post_form(provider.token_endpoint, form, auth)
    if answer.status != 200:
        raise NotSignedIn(f"{configured.name} refused the code ({answer.status}); start again")
    document = answer.json()
    token = document.get("id_token") if isinstance(document, dict) else None
    keys = (await outbound.get(provider.jwks_uri)).json()
    expected = ExpectedClaims(provider.issuer, configured.client_id, flow.nonce)
    return oidc.verify(token, keys, expected, server.now)


async def _first(
    server: Server, configured: OidcProvider, identity: ProviderIdentity, invite: str | None
) -> Account:
    """Create the account, named by provider and subject, with a suffix if another account has that name."""
    mark = hashlib.sha256(f"{identity.issuer}\0{identity.subject}".encode()).hexdigest()[:12]
    name = f"{configured.name}-{mark}"
    first = FirstCredential(identity=(identity.issuer, identity.subject))
    for each in (name, f"{name}-{secrets.token_hex(4)}"):
        try:
            user = await accounts.create(server, each, first, invite)
        except Conflict:
            found = await server.store.read(
                operations.user_by_oidc(identity.issuer, identity.subject)
            )
            if found is not None:
                return found  # concurrent first sign-ins
        else:
            return Account(user, None, None)
    raise Conflict(
        "the account of this identity could not be created because of a concurrent request; sign in again"
    )


async def _opened(server: Server, state: str) -> _OidcFlow:
    try:
        sealed = base64.b64decode(state, altchars=b"-_", validate=True)
        flow = _OidcFlow(**json.loads(await server.identity.sealer.open(_STATE, sealed)))
    except (GpoolError, ValueError, TypeError, binascii.Error) as error:
        raise NotSignedIn("this sign-in was not started on this server; start again") from error
    if flow.expires_at <= server.now:
        raise NotSignedIn("this sign-in expired; start again")
    return flow


async def _discovered(server: Server, configured: OidcProvider) -> ProviderEndpoints:
    url = oidc.discovery_url(configured.issuer)
    answer = await server.identity.outbound.get_cached(url, server.now)
    return oidc.read_discovery(answer.json(), configured.issuer)


def _configured(server: Server, name: str) -> OidcProvider:
    known = server.settings.oidc
    for each in known:
        if each.name == name or (not name and len(known) == 1):
            return each
    names = ", ".join(each.name for each in known) or "none"
    raise NotFound(f"no provider {name[:40]!r} is configured; configured are: {names}")


def _may_redirect_to(server: Server, uri: str) -> bool:
    try:
        parts, origin = urlsplit(uri), origin_of(uri)
    except (ValueError, Invalid):
        return False
    if not uri.isascii() or not uri.isprintable() or parts.username is not None or parts.fragment:
        return False
    if origin == server.settings.origin:
        return True
    return parts.scheme == "http" and parts.hostname is not None and is_loopback(parts.hostname)
