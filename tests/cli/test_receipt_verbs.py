"""`gpool receipt` and the offline verbs of `gpool payout`: files in, verdicts out, no server."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from eth_account import Account

from gpool.cli.main import cli
from gpool.wallet.receipt_keys import parse_history
from gpool.wallet.receipts import receipts_root
from gpool.wallet.signing import WalletKey
from tests.server.server_desk import serving
from tests.wallet.sample_receipts import START_MS, SamplePool, signed_work, work

WALLET = WalletKey(bytes(31) + b"\x07")


class ReceiptFiles:
    """A receipt and the key history, kept after the pool has gone."""

    def __init__(self, folder: Path) -> None:
        pool = SamplePool()
        self.folder, self.older = folder, folder / "older.json"
        self.receipt, self.keys = folder / "receipt.json", folder / "keys.json"
        self.receipt.write_bytes(pool.receipt().to_bytes())
        self.older.write_bytes(pool.history.to_bytes())
        pool.rotate("second", START_MS + 10_000_000)
        self.keys.write_bytes(pool.history.to_bytes())
        self.pool = pool

    def verify(self, *args: str) -> Result:
        return gpool("receipt", "verify", str(self.receipt), "--keys", str(self.keys), *args)


def gpool(*args: str) -> Result:
    return CliRunner().invoke(cli, list(args))


@pytest.fixture
def files(tmp_path: Path) -> ReceiptFiles:
    return ReceiptFiles(tmp_path)


def test_a_receipt_verifies_without_server_and_after_a_rotation(files: ReceiptFiles) -> None:
    done = files.verify()
    assert (done.exit_code, done.stdout.splitlines()[0]) == (0, "Valid receipt.")
    assert "2.500000 credits, fee 0.025000" in done.stdout
    shown = json.loads(files.verify("--json").stdout)
    assert shown["valid"] is True
    assert shown["receipt"]["charge"]["amount"] == 2_500_000


def test_an_altered_receipt_fails_with_the_reason(files: ReceiptFiles) -> None:
    data = files.receipt.read_bytes()
    files.receipt.write_bytes(data.replace(b'"amount":2500000', b'"amount":1500000'))
    done = files.verify()
    assert done.exit_code == 1
    assert "the pool's signature does not fit: the receipt was altered" in done.stderr
    assert json.loads(files.verify("--json").stdout)["valid"] is False
    files.receipt.write_bytes(data)
    assert files.verify().exit_code == 0


def test_verification_opens_no_connection(files: ReceiptFiles) -> None:
    """In a process that may not make sockets; the control is a verb that asks the server."""
    code = (
        "import sys\n"
        "def no_sockets(event, args):\n"
        "    if event.startswith('socket.') and event != 'socket.__new__': raise SystemExit(99)\n"
        "sys.addaudithook(no_sockets)\n"
        "from gpool.cli.main import main\n"
        "main(sys.argv[1:])\n"
    )

    def exit_code(*args: str) -> int:
        command = [sys.executable, "-c", code, "--url", "http://127.0.0.1:9", "--key", "k", *args]
        return subprocess.run(command, capture_output=True, check=False).returncode

    assert exit_code("receipt", "verify", str(files.receipt), "--keys", str(files.keys)) == 0
    assert exit_code("ps") == 99


def test_the_history_is_found_in_gpools_folder(
    files: ReceiptFiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GPOOL_HOME", str(files.folder))
    missing = gpool("receipt", "verify", str(files.receipt))
    assert (missing.exit_code, "gpool receipt fetch-keys" in missing.stderr) == (4, True)
    files.keys.rename(files.folder / "receipt-keys.json")
    assert gpool("receipt", "verify", str(files.receipt)).exit_code == 0


def test_a_wallets_signature_of_the_typed_data_is_checked(files: ReceiptFiles) -> None:
    printed = gpool("receipt", "typed-data", str(files.receipt))
    document = json.loads(printed.stdout)
    signature = Account.from_key(WALLET.secret).sign_typed_data(full_message=document).signature
    by_wallet = ("--wallet", WALLET.address, "--wallet-signature", "0x" + signature.hex())
    done = files.verify(*by_wallet)
    assert (done.exit_code, f"wallet {WALLET.address}" in done.stdout) == (0, True)
    files.receipt.write_bytes(
        files.pool.receipt(signed_work(work(attempt=9)), issued_ms=START_MS + 10_000_000).to_bytes()
    )
    other = files.verify(*by_wallet)
    assert (other.exit_code, "did not sign this receipt" in other.stderr) == (1, True)
    assert files.verify().exit_code == 0
    assert files.verify("--wallet", WALLET.address).exit_code == 2


def test_a_history_is_listed_and_compared_with_an_older_copy(files: ReceiptFiles) -> None:
    keys = ("receipt", "keys", "--keys", str(files.keys))
    listed = json.loads(gpool(*keys, "--previous", str(files.older), "--json").stdout)
    assert [(one["from_ms"], one["to_ms"]) for one in listed] == [
        (START_MS, START_MS + 10_000_000),
        (START_MS + 10_000_000, None),
    ]
    assert "2027-01-15" in gpool(*keys).stdout
    reversed_ = gpool("receipt", "keys", "--keys", str(files.older), "--previous", str(files.keys))
    assert (reversed_.exit_code, "keys were replaced" in reversed_.stderr) == (2, True)


def test_a_pool_without_a_chain_pays_by_its_payout_file(files: ReceiptFiles) -> None:
    amounts, first, second = (str(files.folder / name) for name in ("a.csv", "1.json", "2.json"))
    receipts = files.folder / "receipts"
    receipts.mkdir()
    files.receipt.rename(receipts / "one.json")
    pool = ("--pool", "p-1", "--receipts", str(receipts))
    Path(amounts).write_text("account,cumulative\nu-1,500\nu-2,70\n")
    assert gpool("payout", "build", amounts, *pool, "--period", "1", "-o", first).exit_code == 0
    Path(amounts).write_text("account,cumulative\nu-1,800\n")
    more = ("--period", "2", "--previous", first, "-o", second, "--json")
    built = json.loads(gpool("payout", "build", amounts, *pool, *more).stdout)
    assert (built["total_due"], built["total_cumulative"], built["root"]) == ("300", "870", None)
    root = receipts_root([(receipts / "one.json").read_bytes()])
    assert built["receipts_root"] == "0x" + root.hex()
    table = gpool("payout", "csv", second).stdout
    assert table == "account,cumulative,due\nu-1,800,300\nu-2,70,0\n"
    verify = ("payout", "verify", second, "--previous", first, "--receipts", str(receipts))
    assert gpool(*verify).exit_code == 0
    (receipts / "one.json").unlink()
    assert "do not have the root" in gpool(*verify).stderr
    absent = gpool("payout", "verify", second, "--receipts", str(files.folder / "none"))
    assert (absent.exit_code, "there is no folder" in absent.stderr) == (4, True)
    assert "names no contract" in gpool("payout", "publish", second).stderr


def test_a_proof_is_printed_for_one_account(files: ReceiptFiles) -> None:
    amounts, file = files.folder / "a.csv", str(files.folder / "1.json")
    amounts.write_text(f"account,cumulative\n{WALLET.address},500\n0x{'0' * 39}1,70\n")
    at = ("--chain-id", "8453", "--contract", "0x" + "0" * 39 + "5")
    options = ("--pool", "p-1", "--period", "1", *at, "-o", file)
    assert gpool("payout", "build", str(amounts), *options).exit_code == 0
    proof = json.loads(gpool("payout", "proof", file, WALLET.address).stdout)
    assert (proof["cumulative"], len(proof["proof"]), proof["chain_id"]) == ("500", 1, 8453)
    missing = gpool("payout", "proof", file, "0x" + "0" * 39 + "2")
    assert (missing.exit_code, "has no amount in period 1" in missing.stderr) == (2, True)
    alone = gpool("payout", "build", str(amounts), *options[:4], "--chain-id", "1", "-o", file)
    assert (alone.exit_code, "given together" in alone.stderr) == (2, True)
    key = gpool("payout", "claim", file, WALLET.address, "--rpc", "http://127.0.0.1:9")
    assert (key.exit_code, "--rpc needs --wallet-key" in key.stderr) == (2, True)


def test_the_history_is_fetched_from_a_pool_and_only_continued(tmp_path: Path) -> None:
    """A history that does not continue the kept one is not written."""
    home = tmp_path / "home"
    kept = home / "receipt-keys.json"
    with serving(tmp_path / "data") as live:
        env = {"GPOOL_HOME": str(home), "GPOOL_URL": live.url, "GPOOL_KEY": live.key}

        def typed(*args: str) -> Result:
            return CliRunner().invoke(cli, list(args), env=env)

        assert typed("receipt", "fetch-keys").exit_code == 4
        assert typed("admin", "receipt-keys", "rotate").exit_code == 0
        assert typed("receipt", "fetch-keys").exit_code == 0
        first = kept.read_bytes()
        rotated = json.loads(typed("admin", "receipt-keys", "rotate", "--json").stdout)
        assert len(rotated["keys"]) == 2
        assert typed("receipt", "fetch-keys").exit_code == 0
        assert parse_history(kept.read_bytes()).extends(parse_history(first))
        foreign = SamplePool().history.to_bytes()
        kept.write_bytes(foreign)
        refused = typed("receipt", "fetch-keys")
        assert (refused.exit_code, "nothing was written" in refused.stderr) == (2, True)
        assert kept.read_bytes() == foreign
    assert json.loads(typed("receipt", "keys", "--json").stdout)[0]["to_ms"] is None
