"""`gpool payout`: payout files and their Merkle trees; calls of the distributor contract, printed or sent."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from gpool.cli.command import SectionedCommand, as_json, client_of, examples, option_section
from gpool.cli.market.receipts import file_argument, read_bytes
from gpool.cli.printing import emit_json, show, table
from gpool.core.errors import Conflict, Invalid, NotFound

if TYPE_CHECKING:
    from gpool.transfer.json_rpc import EthereumNode
    from gpool.wallet.payouts import DistributorAddress, PayoutFile
    from gpool.wallet.signing import WalletKey

F = TypeVar("F", bound=Callable[..., Any])
SUMMARY = "pool period accounts total_due total_cumulative chain_id contract root receipts_root"

previous_option = click.option(
    "--previous",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="Payout file of the period before.",
)
receipts_option = click.option(
    "--receipts",
    type=click.Path(path_type=Path),
    metavar="DIR",
    help="Folder with the receipts of the period (*.json), whose root the file holds.",
)


def sending(function: F) -> F:
    """Options of a call: without --rpc it is printed, with it sent."""
    function = click.option(
        "--wallet-key",
        type=click.Path(path_type=Path),
        metavar="FILE",
        help="Key file or keystore of the wallet that pays the gas; needed with --rpc.",
    )(function)
    function = click.option(
        "--rpc", metavar="URL", help="Send through this Ethereum node (default: print the call)."
    )(function)
    return as_json(function)


@dataclass(frozen=True, slots=True)
class Sending:
    rpc: str | None
    wallet_key: Path | None
    as_json: bool


@click.group()
def payout() -> None:
    """List, build and verify payouts; claim them."""


@payout.command("ls", epilog=examples("gpool payout ls", "gpool payout ls --json"))
@as_json
@click.pass_context
def payout_ls(ctx: click.Context, as_json: bool) -> None:
    """List closed periods with your part of each."""
    from gpool.core.money.transfers import format_credits

    items = client_of(ctx).api.get_json("/v1/payouts?limit=200")["items"]
    if as_json:
        emit_json(items)
        return
    rows = [
        (
            one["number"],
            one["month"],
            one["accounts"],
            format_credits(int(one["total_due"])),
            format_credits(one["own_microcredits"]),
            one["own_payee"] or "-",
        )
        for one in items
    ]
    columns = ("period", "month", "accounts", "due", "yours", "paid to")
    table(columns, rows, "No period is closed yet.")


@payout.command("fetch", epilog=examples("gpool payout fetch 1 -o payout-1.json"))
@click.argument("period", type=click.IntRange(min=1))
@click.option(
    "-o",
    "--output",
    required=True,
    type=click.Path(path_type=Path, dir_okay=False),
    metavar="FILE",
    help="Payout file to write.",
)
@click.pass_context
def payout_fetch(ctx: click.Context, period: int, output: Path) -> None:
    """Fetch the payout file of a closed period, to verify it and to claim."""
    from gpool.wallet import payouts
    from gpool.wallet.canonical_json import encode

    data = encode(client_of(ctx).api.get_json(f"/v1/payouts/{period}"))
    payouts.parse(data)
    output.write_bytes(data)
    click.echo(str(output))


period, chain = option_section("Period"), option_section("Chain")


@payout.command(
    "build",
    cls=SectionedCommand,
    epilog=examples(
        "gpool payout build amounts.csv --pool p-1 --period 1 -o payout-1.json",
        "gpool payout build amounts.csv --pool p-1 --period 2 --previous payout-1.json "
        "--chain-id 8453 --contract 0x… -o payout-2.json",
    ),
)
@click.argument("amounts", type=click.Path(path_type=Path))
@period("--pool", required=True, metavar="ID", help="Id of the pool.")
@period("--period", required=True, type=int, metavar="N", help="Number of the period, from 1.")
@chain("--chain-id", type=click.IntRange(min=1), metavar="N", help="Chain of --contract.")
@chain("--contract", metavar="ADDRESS", help="Distributor contract (default: no chain).")
@previous_option
@receipts_option
@click.option(
    "-o",
    "--output",
    required=True,
    type=click.Path(path_type=Path, dir_okay=False),
    metavar="FILE",
    help="Payout file to write.",
)
@as_json
def payout_build(
    amounts: Path,
    pool: str,
    period: int,
    chain_id: int | None,
    contract: str | None,
    previous: Path | None,
    receipts: Path | None,
    output: Path,
    as_json: bool,
) -> None:
    """Build a payout file from cumulative amounts (CSV: account,cumulative)."""
    from gpool.wallet import payouts

    if (chain_id is None) != (contract is None):
        raise Invalid("--chain-id and --contract are given together")
    at = None
    if chain_id is not None and contract is not None:
        at = payouts.DistributorAddress(chain_id, contract)
    try:
        text = read_bytes(amounts).decode("utf-8-sig")
    except UnicodeDecodeError as exc:
        raise Invalid(f"{amounts} is not UTF-8 text") from exc
    made = payouts.close(
        payouts.Period(pool, period, _receipts_root(receipts), at),
        payouts.amounts_from_csv(text),
        None if previous is None else _file(previous),
    )
    data = made.to_bytes()
    payouts.parse(data)  # what is published is checked as its readers check it
    output.write_bytes(data)
    _summary(made, as_json)


@payout.command(
    "verify", epilog=examples("gpool payout verify payout-2.json --previous payout-1.json")
)
@file_argument
@previous_option
@receipts_option
@as_json
def payout_verify(file: Path, previous: Path | None, receipts: Path | None, as_json: bool) -> None:
    """Recompute totals and root of a payout file."""
    from gpool.wallet import payouts
    from gpool.wallet.errors import BadPayout

    found = _file(file)
    if previous is not None:
        payouts.check_successor(found, _file(previous))
    if receipts is not None and found.receipts_root != "0x" + _receipts_root(receipts).hex():
        raise BadPayout(f"the receipts in {receipts} do not have the root {found.receipts_root}")
    _summary(found, as_json)


@payout.command("csv", epilog=examples("gpool payout csv payout-2.json > payout-2.csv"))
@file_argument
def payout_csv(file: Path) -> None:
    """Print account, cumulative amount and amount due as CSV."""
    click.echo(_file(file).to_csv(), nl=False)


@payout.command("proof", epilog=examples("gpool payout proof payout-2.json 0x…"))
@file_argument
@click.argument("account")
def payout_proof(file: Path, account: str) -> None:
    """Print the claim of an account with its Merkle proof, as JSON."""
    from gpool.wallet.payouts import claim_of

    found = claim_of(_file(file), account)
    emit_json(
        {
            "chain_id": found.distributor.chain_id,
            "contract": found.distributor.contract,
            "account": found.account,
            "cumulative": str(found.cumulative),
            "proof": ["0x" + each.hex() for each in found.proof],
        }
    )


@payout.command(
    "claim",
    epilog=examples(
        "gpool payout claim payout-2.json 0x…",
        "gpool payout claim payout-2.json 0x… --rpc http://127.0.0.1:8545 --wallet-key key.json",
    ),
)
@file_argument
@click.argument("account")
@sending
def payout_claim(
    file: Path, account: str, rpc: str | None, wallet_key: Path | None, as_json: bool
) -> None:
    """Claim what an account is due; any wallet may send it, the account is paid."""
    from gpool.wallet.payouts import claim_of
    from gpool.wallet.transactions import claim_data

    found = claim_of(_file(file), account)
    _call(found.distributor, claim_data(found), Sending(rpc, wallet_key, as_json))


@payout.command("publish", epilog=examples("gpool payout publish payout-2.json"))
@file_argument
@sending
def payout_publish(file: Path, rpc: str | None, wallet_key: Path | None, as_json: bool) -> None:
    """Publish the root of a payout file (publisher's key)."""
    from gpool.wallet.transactions import publish_data

    found = _file(file)
    _call(_distributor(found), publish_data(found), Sending(rpc, wallet_key, as_json))


@payout.command("activate", epilog=examples("gpool payout activate payout-2.json"))
@file_argument
@sending
def payout_activate(file: Path, rpc: str | None, wallet_key: Path | None, as_json: bool) -> None:
    """Activate the published root after its delay (any key)."""
    from gpool.wallet.transactions import selector

    at = _distributor(_file(file))
    _call(at, selector("activate()"), Sending(rpc, wallet_key, as_json))


@payout.command("stop", epilog=examples("gpool payout stop payout-2.json"))
@file_argument
@sending
def payout_stop(file: Path, rpc: str | None, wallet_key: Path | None, as_json: bool) -> None:
    """Stop the published root while it waits (guardian's or publisher's key)."""
    from gpool.wallet.transactions import selector

    at = _distributor(_file(file))
    _call(at, selector("stop()"), Sending(rpc, wallet_key, as_json))


def _file(path: Path) -> PayoutFile:
    from gpool.wallet.payouts import parse

    return parse(read_bytes(path))


def _distributor(file: PayoutFile) -> DistributorAddress:
    if file.distributor is None:
        raise Invalid("this payout file names no contract: the pool pays by other means")
    return file.distributor


def _receipts_root(folder: Path | None) -> bytes:
    """Root of the receipts in a folder, each of which must be well-formed; zeros without a folder."""
    from gpool.wallet import receipts

    if folder is not None and not folder.is_dir():
        raise NotFound(f"there is no folder {folder}")
    files = [] if folder is None else sorted(folder.glob("*.json"))
    return receipts.receipts_root(receipts.parse(read_bytes(each)).to_bytes() for each in files)


def _summary(file: PayoutFile, as_json: bool) -> None:
    at = file.distributor
    document = {
        "pool": file.pool,
        "period": file.period,
        "accounts": len(file.lines),
        "total_due": file.total_due,
        "total_cumulative": file.total_cumulative,
        "chain_id": None if at is None else at.chain_id,
        "contract": None if at is None else at.contract,
        "root": file.root,
        "receipts_root": file.receipts_root,
    }
    show(document, as_json, SUMMARY)


def _call(at: DistributorAddress, data: bytes, sending: Sending) -> None:
    """Print a call of the contract, or sign and send it and wait until it is mined."""
    from gpool.cli.wallet import key_from
    from gpool.transfer.json_rpc import CallReverted, EthereumNode
    from gpool.wallet.transactions import reason_of

    if sending.rpc is None:
        if sending.wallet_key is not None:
            raise Invalid("--wallet-key is used with --rpc only")
        call = {"chain_id": at.chain_id, "to": at.contract, "data": "0x" + data.hex()}
        show(call, sending.as_json, "chain_id to data")
        return
    if sending.wallet_key is None:
        raise Invalid("--rpc needs --wallet-key FILE: the wallet that pays the gas")
    with EthereumNode(sending.rpc) as node:
        try:
            receipt = _sent(node, at, data, key_from(sending.wallet_key))
        except CallReverted as error:
            raise Conflict(reason_of(error.data) or error.detail) from error
    if int(receipt["status"], 16) != 1:
        raise Conflict(f"the contract refused {receipt['transactionHash']}")
    document = {
        "transaction": receipt["transactionHash"],
        "block": int(receipt["blockNumber"], 16),
        "gas": int(receipt["gasUsed"], 16),
    }
    show(document, sending.as_json, "transaction block gas")


def _sent(
    node: EthereumNode, at: DistributorAddress, data: bytes, key: WalletKey
) -> dict[str, Any]:
    from gpool.wallet import signing
    from gpool.wallet.transactions import FeeTransaction

    chain = node.number("eth_chainId")
    if chain != at.chain_id:
        raise Conflict(f"the node is on chain {chain}, the payout on chain {at.chain_id}")
    call = {"from": key.address, "to": at.contract, "data": "0x" + data.hex()}
    gas = node.number("eth_estimateGas", call)
    priority = node.number("eth_maxPriorityFeePerGas")
    base = int(node.call("eth_getBlockByNumber", "latest", False)["baseFeePerGas"], 16)
    transaction = FeeTransaction(
        chain_id=chain,
        nonce=node.number("eth_getTransactionCount", key.address, "pending"),
        priority_fee=priority,
        max_fee=2 * base + priority,
        gas=gas + gas // 5,
        to=signing.parse(at.contract),
        data=data,
    )
    hash_ = node.call("eth_sendRawTransaction", "0x" + transaction.signed(key).hex())
    return node.mined(hash_)
