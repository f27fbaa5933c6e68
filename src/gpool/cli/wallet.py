"""`gpool wallet`. Linking and unlinking require proof of wallet and account."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from gpool.cli.account import anonymous, password_of
from gpool.cli.command import as_json, client_of
from gpool.cli.output.printing import emit_json, table
from gpool.cli.references import quoted
from gpool.cli.signing import signed
from gpool.core.errors import Invalid

key_option = click.option(
    "--wallet-key",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="Key file or keystore of the wallet (default: ask for a signature).",
)
proof_option = click.option(
    "--proof-key",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="Authenticate with another linked wallet instead of the password.",
)


@click.group()
def wallet() -> None:
    """Manage the wallets of your account."""


@wallet.command("ls")
@as_json
@click.pass_context
def wallet_ls(ctx: click.Context, as_json: bool) -> None:
    """List your wallets."""
    found = client_of(ctx).api.get_json("/v1/wallets")["items"]
    if as_json:
        emit_json(found)
        return
    rows = [(one["address"], "yes" if one["payout"] else "", one["linked_at"]) for one in found]
    table(("address", "payout", "linked"), rows, "No wallets; link one with: gpool wallet link")


@wallet.command("link")
@click.argument("address", required=False)
@key_option
@proof_option
@as_json
@click.pass_context
def wallet_link(
    ctx: click.Context,
    address: str | None,
    wallet_key: Path | None,
    proof_key: Path | None,
    as_json: bool,
) -> None:
    """Link a wallet to your account."""
    document = _proved(ctx, address, wallet_key, proof_key)
    linked = client_of(ctx).api.send_json("POST", "/v1/wallets", document)
    if as_json:
        emit_json(linked)
    else:
        click.echo(f"Linked {linked['address']}.")


@wallet.command("unlink")
@click.argument("address")
@key_option
@proof_option
@click.pass_context
def wallet_unlink(
    ctx: click.Context, address: str, wallet_key: Path | None, proof_key: Path | None
) -> None:
    """Unlink a wallet; another way to sign in must remain."""
    import json

    document = _proved(ctx, address if wallet_key is None else None, wallet_key, proof_key)
    client_of(ctx).api.send(
        "DELETE",
        f"/v1/wallets/{quoted(address)}",
        body=json.dumps(document).encode(),
        headers={"content-type": "application/json"},
    )
    click.echo(f"Unlinked {address}.")


@wallet.command("payout")
@click.argument("address")
@click.option("--off", is_flag=True, help="Stop payouts to this wallet.")
@as_json
@click.pass_context
def wallet_payout(ctx: click.Context, address: str, off: bool, as_json: bool) -> None:
    """Select the wallet that receives payouts."""
    path = f"/v1/wallets/{quoted(address)}"
    changed = client_of(ctx).api.send_json("PATCH", path, {"payout": not off})
    if as_json:
        emit_json(changed)
    else:
        click.echo(
            f"{changed['address']} {'receives' if changed['payout'] else 'receives no'} payouts."
        )


def _proved(
    ctx: click.Context, address: str | None, wallet_key: Path | None, proof_key: Path | None
) -> dict[str, Any]:
    if (address is None) == (wallet_key is None):
        raise Invalid("name the wallet: give either ADDRESS or --wallet-key FILE")
    api = anonymous(ctx)
    document: dict[str, Any] = dict(signed(api, wallet_key, address))
    if proof_key is not None:
        document["proof"] = signed(api, proof_key, None)
    else:
        document["password"] = password_of("Password of your account")
    return document
