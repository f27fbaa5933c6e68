"""The account page: password, API keys, secrets, sessions, wallets, teams, budget, storage, export, deletion."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response

from gpool.core.errors import GpoolError, Invalid
from gpool.core.ids import decode, encode
from gpool.core.permissions import Action, TeamId
from gpool.core.scheduler.order.limits import Holder
from gpool.server.actions.accounts import (
    accounts,
    export,
    invitations,
    named_secrets,
    removal,
    sessions,
    teams,
    wallets,
)
from gpool.server.actions.money import ledger, statements
from gpool.server.actions.tasks import deletion
from gpool.server.api.callers import server_of
from gpool.server.api.messages import raw, stream
from gpool.server.identity.throttle import RouteClass
from gpool.server.store.identity_values import Caller
from gpool.server.web.parts import part
from gpool.server.web.rendering import page
from gpool.server.web.routing import PageRouter, see
from gpool.server.web.visitors import (
    Form,
    form_of,
    is_public_origin,
    set_cookie,
    validated,
    visitor,
)
from gpool.wire.identity import (
    AccountDeletion,
    KeyMade,
    KeyRequest,
    NamedSecretRequest,
    PasswordChange,
)
from gpool.wire.ledger import BudgetRequest

routes = PageRouter("pages")

ENTRIES = 10
DAY_S = 86_400


@routes.page("/account", Action.ME_READ)
async def show_account(request: Request) -> Response:
    """Show the visitor's account."""
    who = await visitor(request)
    return await account_page(request, who, done=request.query_params.get("done", ""))


async def account_page(
    request: Request,
    who: Caller,
    status: int = 200,
    *,
    done: str = "",
    error: GpoolError | None = None,
    made: KeyMade | None = None,
) -> Response:
    server = server_of(request)
    return page(
        request,
        "account.html",
        status,
        me=await accounts.me(server, who),
        id=encode("user", who.user.id),
        keys=await part(accounts.list_keys(server, who)),
        secrets=await part(named_secrets.list_usable(server, who)),
        sessions=await part(sessions.list_sessions(server, who)),
        wallets=await part(wallets.list_wallets(server, who)),
        teams=await part(teams.list_teams(server, who)),
        invitations=await part(invitations.list_own(server, who)),
        ledger=await part(ledger.ledger(server, who, ("user", who.user.id), None, ENTRIES)),
        storage=await part(deletion.report_storage(server, who, None)),
        wallets_at="" if is_public_origin(request) else server.settings.origin,
        done=_DONE.get(done, ""),
        error=error,
        made=made,
    )


_DONE = {
    "password": "The password was changed; all other sessions ended.",
    "key": "The key was revoked.",
    "secret": "The secret was stored. Tasks that were submitted before keep the old value.",
    "no-secret": "The secret was deleted. Tasks that were submitted before keep their copy.",
    "session": "The session ended.",
    "budget": "The budget was changed.",
    "wallet": "The wallet was linked.",
}


async def _tried(request: Request, who: Caller, form: Form, kind: str) -> Response:
    """Carry out one form of the page; an error is shown on it."""
    server = server_of(request)
    try:
        match kind:
            case "password":
                if form.raw("new") != form.raw("again"):
                    raise Invalid("the two new passwords differ; type the same one twice")
                wanted = {"old": form.raw("old") or None, "new": form.raw("new")}
                change = validated(PasswordChange, wanted)
                await accounts.change_password(server, who, change.old, change.new, None)
            case "key":
                await accounts.revoke_key(server, who, decode("key", form.text("id")), None)
            case "secret":
                kept = validated(NamedSecretRequest, {"value": form.raw("value")})
                team, value = _team(form), kept.value.get_secret_value()
                await named_secrets.put(server, who, team, form.text("name"), value, None)
            case "no-secret":
                await named_secrets.delete(server, who, _team(form), form.text("name"), None)
            case "session":
                await sessions.end_session(server, who, form.text("id")[:64], None)
            case _:
                cap = _microcredits(form.text("cap"))
                budget = validated(BudgetRequest, {"cap_microcredits": cap})
                holder: Holder = ("user", who.user.id)
                await ledger.set_budget(server, who, holder, budget.cap_microcredits, None)
    except GpoolError as error:
        return await account_page(request, who, error.status, error=error)
    return see(f"/account?done={kind}")


def _team(form: Form) -> TeamId | None:
    text = form.text("team")
    return TeamId(decode("team", text)) if text else None


def _microcredits(text: str) -> int | None:
    if not text:
        return None
    try:
        return round(float(text) * 1_000_000)
    except (ValueError, OverflowError):
        raise Invalid(f"the budget {text[:40]!r} is not a number of credits") from None


@routes.form("/account/password", Action.PASSWORD_CHANGE, rate=RouteClass.SIGN_IN)
async def change_password_on_page(request: Request) -> Response:
    """Change the password; all other sessions end."""
    who = await visitor(request)
    return await _tried(request, who, await form_of(request), "password")


@routes.form("/account/keys", Action.KEY_MAKE)
async def create_key_on_page(request: Request) -> Response:
    """Create an API key and show it once."""
    who, form = await visitor(request), await form_of(request)
    try:
        days = form.text("days")
        if days and not (days.isascii() and days.isdigit() and len(days) < 6):
            raise Invalid(f"{days[:20]!r} is not a number of days")
        members = {
            "name": form.text("name"),
            "scopes": list(form.all("scope")) or None,
            "expires_in_s": int(days) * DAY_S if days else None,
        }
        made = await accounts.create_key(
            server_of(request), who, validated(KeyRequest, members), None
        )
    except GpoolError as error:
        return await account_page(request, who, error.status, error=error)
    return await account_page(request, who, made=made)


@routes.form("/account/keys/revoke", Action.KEY_END)
async def revoke_key_on_page(request: Request) -> Response:
    """Revoke an API key."""
    who = await visitor(request)
    return await _tried(request, who, await form_of(request), "key")


@routes.form("/account/secrets", Action.SECRET_CHANGE)
async def set_secret_on_page(request: Request) -> Response:
    """Store a secret of the account or of a team, or replace its value."""
    who = await visitor(request)
    return await _tried(request, who, await form_of(request), "secret")


@routes.form("/account/secrets/delete", Action.SECRET_CHANGE)
async def delete_secret_on_page(request: Request) -> Response:
    """Delete a stored secret."""
    who = await visitor(request)
    return await _tried(request, who, await form_of(request), "no-secret")


@routes.form("/account/sessions/end", Action.SESSION_END)
async def end_session_on_page(request: Request) -> Response:
    """End one session of the account."""
    who = await visitor(request)
    return await _tried(request, who, await form_of(request), "session")


@routes.form("/account/budget", Action.BUDGET_SET)
async def set_budget_on_page(request: Request) -> Response:
    """Set or remove the monthly budget."""
    who = await visitor(request)
    return await _tried(request, who, await form_of(request), "budget")


@routes.page("/account/export", Action.ACCOUNT_EXPORT, rate=RouteClass.STREAM)
async def export_account(request: Request) -> Response:
    """Download the account's data, one JSON object a line."""
    who = await visitor(request)
    response = stream(await export.lines(server_of(request), who), "application/x-ndjson")
    response.headers["Content-Disposition"] = 'attachment; filename="gpool-account.ndjson"'
    return response


@routes.page("/receipts/{id}", Action.LEDGER_READ)
async def show_receipt(request: Request, id: str) -> Response:
    """Show the canonical bytes of a receipt, to which invoices link."""
    who = await visitor(request)
    return raw(await statements.receipt(server_of(request), who, decode("receipt", id)))


@routes.form("/account/delete", Action.ACCOUNT_DELETE, rate=RouteClass.SIGN_IN)
async def delete_account_on_page(request: Request) -> Response:
    """Delete the account after its password, or its name, was typed."""
    who, form = await visitor(request), await form_of(request)
    members = {"password": form.raw("password") or None, "name": form.text("name") or None}
    try:
        wanted = validated(AccountDeletion, members)
        await removal.delete_account(server_of(request), who, wanted)
    except GpoolError as error:
        return await account_page(request, who, error.status, error=error)
    response = see("/sign-in")
    set_cookie(request, response, "")
    return response
