"""Verbs of one's account: register, login, logout, keys."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import click

from gpool.cli.calling import as_json, client_of
from gpool.cli.output.printing import age, emit_json, table
from gpool.cli.references import own_team_id, quoted
from gpool.core.errors import Invalid

if TYPE_CHECKING:
    from gpool.client.connection.transport import ApiTransport

invite_option = click.option("--invite", metavar="TOKEN", help="An operator's invite.")
profile_option = click.option(
    "--profile", "profile", metavar="NAME", help="Where to keep it (default: the pool's address)."
)


def password_of(prompt: str, *, confirm: bool = False) -> str:
    """From GPOOL_PASSWORD, else asked for on the terminal; never an argument, which others could see."""
    given = os.environ.get("GPOOL_PASSWORD")
    if given is not None:
        return given
    try:
        found: str = click.prompt(prompt, hide_input=True, confirmation_prompt=confirm, err=True)
    except click.Abort as left:
        if sys.stdin.isatty() or not isinstance(left.__context__, EOFError):  # somebody was there
            raise
        raise Invalid("there is nobody to ask for the password; set GPOOL_PASSWORD") from None
    return found


def anonymous(ctx: click.Context) -> ApiTransport:
    """The pool, as nobody."""

    client = client_of(ctx)
    api: ApiTransport = client.api.without_credentials()
    ctx.call_on_close(api.close)
    return api


def keep(ctx: click.Context, answer: Any, profile: str | None) -> dict[str, Any]:
    """The tokens go to disk, their profile is chosen; gives the account."""
    from gpool.client.connection.config import home, save_sign_in
    from gpool.client.connection.sign_in import SessionFile, SignInSession, Tokens

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
    """Make an account, and sign in.

    A name begins with a small letter; more of them, digits and . _ - follow.
    """
    api = anonymous(ctx)
    password = password_of("Password", confirm=True)
    wanted = {"name": name, "password": password} | ({"invite": invite} if invite else {})
    api.send_json("POST", "/v1/users", wanted)
    answer = api.send_json("POST", "/v1/auth/password", {"name": name, "password": password})
    greet(keep(ctx, answer, profile), as_json)


@click.command(epilog="Example: gpool --url https://pool.example login ada")
@click.argument("name", required=False)
@click.option(
    "--wallet-key",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="Sign in with a wallet: its key file, or better an encrypted keystore.",
)
@click.option(
    "--wallet",
    metavar="ADDRESS",
    help="Sign in with a wallet elsewhere: prints what to sign, takes the signature.",
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
    invite: str | None,
    profile: str | None,
    as_json: bool,
) -> None:
    """Sign in, with a password or a wallet."""
    from gpool.cli.signing import signed

    if sum(way is not None for way in (name, wallet_key, wallet)) > 1:
        raise Invalid("give one way in: a NAME, --wallet-key FILE or --wallet ADDRESS")
    api = anonymous(ctx)
    if wallet_key is not None or wallet is not None:
        message = signed(api, wallet_key, wallet)
        wanted = message | ({"invite": invite} if invite else {})
        answer = api.send_json("POST", "/v1/auth/wallet", wanted)
    else:
        chosen = name or click.prompt("Name", err=True)
        document = {"name": chosen, "password": password_of("Password")}
        answer = api.send_json("POST", "/v1/auth/password", document)
    greet(keep(ctx, answer, profile), as_json)


@click.command()
@click.option("--everywhere", is_flag=True, help="Every sign-in of the account.")
@click.pass_context
def logout(ctx: click.Context, everywhere: bool) -> None:
    """Sign out."""
    from gpool.client.connection.config import forget_sign_in

    client = client_of(ctx)
    session = client.session
    tokens = None if session is None else session.file.read()
    if session is None or tokens is None:
        click.echo("Not signed in: nothing to end.", err=True)
        return
    wanted = {"refresh_token": tokens.refresh_token, "everywhere": everywhere}
    anonymous(ctx).send_json("POST", "/v1/auth/logout", wanted)
    session.file.remove()
    forget_sign_in(session.file.path)
    click.echo("Signed out.")


# ---- API keys


@click.group()
def keys() -> None:
    """API keys: list, make, end."""


@keys.command("ls")
@click.option("--all", "everything", is_flag=True, help="The ended ones too.")
@as_json
@click.pass_context
def keys_ls(ctx: click.Context, everything: bool, as_json: bool) -> None:
    """List your keys."""
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
            "ended" if one["ended_at"] else one["expires_at"] or "never",
            age(one["last_used_at"], date) if one["last_used_at"] else "never",
        )
        for one in shown
    ]
    columns = ("id", "name", "scopes", "team", "expires", "used")
    table(columns, rows, "No keys yet; make one with: gpool keys make NAME")


@keys.command("make")
@click.argument("name")
@click.option(
    "--scope", "scopes", multiple=True, help="What it may do; may be given several times."
)
@click.option("--expires", metavar="TIME", help="How long it is good, e.g. 30d.")
@click.option("--team", metavar="TEAM", help="Only for this team of yours.")
@as_json
@click.pass_context
def keys_make(
    ctx: click.Context,
    name: str,
    scopes: tuple[str, ...],
    expires: str | None,
    team: str | None,
    as_json: bool,
) -> None:
    """Make a key; it is shown this once."""
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
    click.echo(f"  {made['id']}; it is not shown again. Use it as GPOOL_KEY.", err=True)


@keys.command("end")
@click.argument("key", metavar="ID")
@click.pass_context
def keys_end(ctx: click.Context, key: str) -> None:
    """End a key: it opens nothing any more."""
    client_of(ctx).api.send("DELETE", f"/v1/keys/{quoted(key)}")
    click.echo(f"{key} ended")
