"""Verbs `register`, `login`, `logout`, `keys`, `secret`."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlencode, urlsplit

import click

from gpool.cli.command import VerbGroup, as_json, client_of, examples, own_team_id, quoted
from gpool.cli.printing import age, emit_json, table
from gpool.core.errors import Invalid

if TYPE_CHECKING:
    from gpool.client.transport import ApiTransport

OIDC_S = 600
"""Time to sign in at an identity provider, in seconds."""

invite_option = click.option("--invite", metavar="TOKEN", help="Invite token from an operator.")
profile_option = click.option(
    "--profile",
    "profile",
    metavar="NAME",
    help="Profile to save the sign-in to (default: the pool's address).",
)


def password_of(prompt: str, *, confirm: bool = False) -> str:
    """GPOOL_PASSWORD, else from the terminal; never an argument, which process lists show."""
    given = os.environ.get("GPOOL_PASSWORD")
    if given is not None:
        return given
    try:
        found: str = click.prompt(prompt, hide_input=True, confirmation_prompt=confirm, err=True)
    except click.Abort as aborted:
        if sys.stdin.isatty() or not isinstance(aborted.__context__, EOFError):  # the user aborted
            raise
        raise Invalid("no terminal to ask for the password; set GPOOL_PASSWORD") from None
    return found


def anonymous(ctx: click.Context) -> ApiTransport:
    client = client_of(ctx)
    api: ApiTransport = client.api.without_credentials()
    ctx.call_on_close(api.close)
    return api


def store_sign_in(ctx: click.Context, answer: Any, profile: str | None) -> dict[str, Any]:
    from gpool.client.config import SessionFile, SignInSession, Tokens, home, save_sign_in

    client = client_of(ctx)
    name = profile or urlsplit(client.url).netloc
    safe = "".join(letter if letter.isalnum() or letter in "-." else "_" for letter in name)
    file = SessionFile(home() / "sessions" / f"{safe}.json")
    with file.locked():
        file.write(Tokens.of(answer))
    save_sign_in(name, client.url, file.path, fingerprint=client.api.address.fingerprint)
    api = client.api.with_session(SignInSession(file))
    ctx.call_on_close(api.close)
    me: dict[str, Any] = api.get_json("/v1/me")
    return me


def greet(me: dict[str, Any], as_json: bool) -> None:
    if as_json:
        emit_json(me)
    else:
        click.echo(f"Signed in as {me['name']} ({me['id']}).")


@click.command()
@click.argument("name")
@invite_option
@profile_option
@as_json
@click.pass_context
def register(
    ctx: click.Context, name: str, invite: str | None, profile: str | None, as_json: bool
) -> None:
    """Create an account and sign in.

    A name starts with a lower-case letter and may contain lower-case letters, digits and . _ -
    """
    api = anonymous(ctx)
    password = password_of("Password", confirm=True)
    wanted = {"name": name, "password": password} | ({"invite": invite} if invite else {})
    api.send_json("POST", "/v1/users", wanted)
    answer = api.send_json("POST", "/v1/auth/password", {"name": name, "password": password})
    greet(store_sign_in(ctx, answer, profile), as_json)


@click.command(
    epilog=examples(
        "gpool --url https://pool.example login ada",
        "gpool login --wallet-key keystore.json",
        "gpool login --oidc",
    )
)
@click.argument("name", required=False)
@click.option(
    "--wallet-key",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="Sign in with a wallet: its key file, preferably an encrypted keystore.",
)
@click.option(
    "--wallet",
    metavar="ADDRESS",
    help="Sign in with an external wallet: prints the message to sign, reads the signature.",
)
@click.option(
    "--oidc",
    is_flag=False,
    flag_value="",
    metavar="[PROVIDER]",
    help="Sign in with an identity provider of the pool (OpenID Connect), in a browser.",
)
@invite_option
@profile_option
@as_json
@click.pass_context
def login(
    ctx: click.Context,
    name: str | None,
    wallet_key: Path | None,
    wallet: str | None,
    oidc: str | None,
    invite: str | None,
    profile: str | None,
    as_json: bool,
) -> None:
    """Sign in with a password, a wallet or an identity provider."""
    from gpool.cli.wallet import WalletChoice, signed

    if sum(way is not None for way in (name, wallet_key, wallet, oidc)) > 1:
        raise Invalid(
            "several ways to sign in; give one of NAME, --wallet-key FILE, --wallet ADDRESS, --oidc"
        )
    api = anonymous(ctx)
    if oidc is not None:
        answer = _by_provider(api, oidc, invite)
    elif wallet_key is not None or wallet is not None:
        message = signed(api, WalletChoice(wallet_key, wallet))
        wanted = message | ({"invite": invite} if invite else {})
        answer = api.send_json("POST", "/v1/auth/wallet", wanted)
    else:
        chosen = name or click.prompt("Name", err=True)
        document = {"name": chosen, "password": password_of("Password")}
        answer = api.send_json("POST", "/v1/auth/password", document)
    greet(store_sign_in(ctx, answer, profile), as_json)


def _by_provider(api: ApiTransport, provider: str, invite: str | None) -> Any:
    """Tokens of a sign-in at an identity provider: it sends the browser back to a port of this machine."""
    import threading
    import webbrowser

    from gpool.transfer.loopback import LoopbackReceiver

    with LoopbackReceiver() as receiver:
        query = urlencode({"provider": provider, "redirect_uri": receiver.url})
        started = api.get_json(f"/v1/auth/oidc/start?{query}")
        click.echo(f"Sign in with {started['provider']} in your browser:\n", err=True)
        click.echo(f"  {started['url']}\n", err=True)
        # In a thread: a browser in the terminal returns only when it is closed.
        threading.Thread(target=webbrowser.open, args=(started["url"],), daemon=True).start()
        code = receiver.code(started["state"], OIDC_S)
    wanted = {"state": started["state"], "code": code} | ({"invite": invite} if invite else {})
    return api.send_json("POST", "/v1/auth/oidc/finish", wanted)


@click.command()
@click.option("--everywhere", is_flag=True, help="End all sessions of the account.")
@click.pass_context
def logout(ctx: click.Context, everywhere: bool) -> None:
    """Sign out."""
    from gpool.client.config import forget_sign_in

    client = client_of(ctx)
    session = client.session
    tokens = None if session is None else session.file.read()
    if session is None or tokens is None:
        click.echo("Not signed in.", err=True)
        return
    wanted = {"refresh_token": tokens.refresh_token, "everywhere": everywhere}
    anonymous(ctx).send_json("POST", "/v1/auth/logout", wanted)
    session.file.remove()
    forget_sign_in(session.file.path)
    click.echo("Signed out.")


# ---- API keys


@click.group(cls=VerbGroup, renamed={"make": "create", "end": "revoke"})
def keys() -> None:
    """Manage API keys."""


@keys.command("ls")
@click.option("--all", "everything", is_flag=True, help="Include revoked keys.")
@as_json
@click.pass_context
def keys_ls(ctx: click.Context, everything: bool, as_json: bool) -> None:
    """List your API keys."""
    client = client_of(ctx)
    found = client.api.get_json("/v1/keys")["items"]
    shown = [one for one in found if everything or not one["ended_at"]]
    if as_json:
        emit_json(shown)
        return
    date = client.api.date
    rows = [
        (
            one["id"],
            one["name"],
            "all" if one["scopes"] is None else " ".join(one["scopes"]),
            one["team"] or "-",
            "revoked" if one["ended_at"] else one["expires_at"] or "never",
            age(one["last_used_at"], date) if one["last_used_at"] else "never",
        )
        for one in shown
    ]
    columns = ("id", "name", "scopes", "team", "expires", "used")
    table(columns, rows, "No API keys yet; create one with: gpool keys create NAME")


@keys.command("create", epilog=examples("gpool keys create ci --scope tasks:read --expires 30d"))
@click.argument("name")
@click.option(
    "--scope",
    "scopes",
    multiple=True,
    metavar="SCOPE",
    help="Permission, e.g. tasks:read (repeatable; default: all).",
)
@click.option("--expires", metavar="TIME", help="Validity, e.g. 30d (default: unlimited).")
@click.option("--team", metavar="TEAM", help="Restrict the key to this team of yours.")
@as_json
@click.pass_context
def keys_create(
    ctx: click.Context,
    name: str,
    scopes: tuple[str, ...],
    expires: str | None,
    team: str | None,
    as_json: bool,
) -> None:
    """Create an API key and print it once."""
    from gpool.client.times import seconds

    wanted: dict[str, Any] = {"name": name}
    if scopes:
        wanted["scopes"] = list(scopes)
    if expires is not None:
        wanted["expires_in_s"] = int(seconds(expires))
    client = client_of(ctx)
    if team is not None:
        wanted["team"] = own_team_id(client, team)
    made = client.api.send_json("POST", "/v1/keys", wanted)
    if as_json:
        emit_json(made)
        return
    click.echo(made["key"])
    click.echo(f"  {made['id']}; the key is not shown again. Use it as GPOOL_KEY.", err=True)


@keys.command("revoke")
@click.argument("key", metavar="ID")
@click.pass_context
def keys_revoke(ctx: click.Context, key: str) -> None:
    """Revoke an API key."""
    client_of(ctx).api.send("DELETE", f"/v1/keys/{quoted(key)}")
    click.echo(f"{key} revoked")


# ---- stored secrets

secret_name = click.argument("name")
secret_team = click.option("--team", "team_", metavar="TEAM", help="Use a team of yours instead.")


@click.group(cls=VerbGroup)
def secret() -> None:
    """Store secrets that tasks use by name."""


@secret.command(
    "set",
    epilog=examples(
        "gpool secret set HF_TOKEN",
        "gpool secret set HF_TOKEN < token.txt",
        "gpool secret set WANDB_API_KEY --team lab",
        "gpool run --secret HF_TOKEN train.py",
    ),
)
@secret_name
@secret_team
@as_json
@click.pass_context
def secret_set(ctx: click.Context, name: str, team_: str | None, as_json: bool) -> None:
    """Store a secret, or replace its value.

    Reads the value from standard input, without the newline at its end, or asks for it. Tasks that were submitted keep
    the value they had.
    """
    if "=" in name:
        raise Invalid(
            f"{name.partition('=')[0]!r}: give the name only; the value is read from standard input or asked for, "
            "since command lines are visible to every user of this machine"
        )
    path = _secret_path(ctx, name, team_)
    kept = client_of(ctx).api.send_json("PUT", path, {"value": _secret_value(name)})
    if as_json:
        emit_json(kept)
        return
    click.echo(f"{kept['name']} stored; use it with: gpool run --secret {kept['name']}")


@secret.command("ls")
@secret_team
@as_json
@click.pass_context
def secret_ls(ctx: click.Context, team_: str | None, as_json: bool) -> None:
    """List the names of stored secrets."""
    client = client_of(ctx)
    found = client.api.get_json(_secret_path(ctx, "", team_))["items"]
    if as_json:
        emit_json(found)
        return
    date = client.api.date
    rows = [
        (one["name"], age(one["created_at"], date), age(one["updated_at"], date)) for one in found
    ]
    empty = "No stored secrets; store one with: gpool secret set NAME"
    table(("name", "created", "updated"), rows, empty)


@secret.command("rm")
@secret_name
@secret_team
@click.pass_context
def secret_rm(ctx: click.Context, name: str, team_: str | None) -> None:
    """Delete a stored secret; tasks that were submitted keep their copy."""
    client_of(ctx).api.send("DELETE", _secret_path(ctx, name, team_))
    click.echo(f"{name} deleted")


def _secret_path(ctx: click.Context, name: str, team: str | None) -> str:
    query = f"?team={own_team_id(client_of(ctx), team)}" if team else ""
    return f"/v1/secrets{'/' if name else ''}{quoted(name)}{query}"


def _secret_value(name: str) -> str:
    """Value from standard input, or from the terminal without echo; never an argument, which process lists show."""
    if sys.stdin.isatty():
        asked: str = click.prompt(f"Value of {name}", hide_input=True, err=True)
        return asked
    try:
        value = sys.stdin.buffer.read().decode()
    except UnicodeDecodeError:
        raise Invalid(f"the value of {name} on standard input is not UTF-8 text") from None
    value = value.removesuffix("\n").removesuffix("\r")
    if not value:
        raise Invalid(
            f"standard input is empty; pipe the value of {name}, or run this in a terminal"
        )
    return value
