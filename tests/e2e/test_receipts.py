"""A paid task on a real pool: its receipt is verified after the server has gone, its key was replaced and its node removed."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.tools.processes import GPOOL, LONG_LEASE, PATIENCE_S, Pool, eventually


@pytest.fixture
def priced(tmp_path: Path, require: Callable[[str], None]) -> Iterator[Pool]:
    require("bubblewrap")
    settings = {
        **LONG_LEASE,
        "GPOOL_SERVER_PRICES": "true",
        "GPOOL_SERVER_FEE_PPM": "100000",
        "GPOOL_SERVER_VEST_HOURS": "0",
        "GPOOL_SERVER_REGISTRATION": "open",
    }
    pool = Pool(tmp_path, settings)
    try:
        pool.start(agents=())
        pool.join("lent", "--price", "3600/h")  # a credit for a second
        yield pool
    finally:
        pool.stop()


def test_a_receipt_is_verified_without_server_key_and_node(priced: Pool, tmp_path: Path) -> None:
    ada = priced.environment("ada") | {
        "GPOOL_URL": priced.address,
        "GPOOL_PASSWORD": "long enough 7",
    }

    def typed(*words: str, code: int = 0) -> str:
        done = subprocess.run(
            [*GPOOL, *words],
            env=ada,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=PATIENCE_S,
            check=False,
        )
        assert done.returncode == code, done.stderr + done.stdout
        return done.stdout

    def listed(*words: str) -> Any:
        return json.loads(typed(*words, "--json"))

    typed("register", "ada")
    done = priced.gpool("admin", "ledger", "grant", "ada", "1000")
    assert done.returncode == 0, done.stderr
    assert typed("run", "--project", "thesis", "--", "python3", "-c", "print(6*7)").strip() == "42"
    eventually("the receipt is issued", lambda: bool(listed("receipts")), PATIENCE_S)
    [mine] = listed("receipts")
    assert mine["id"] in typed("receipts")
    file, keys = tmp_path / "receipt.json", tmp_path / "keys.json"
    assert typed("receipt", "fetch", mine["id"], "-o", str(file)).strip() == str(file)
    assert "Valid receipt." in typed("receipt", "show", mine["id"])
    [line] = listed("usage", "--charges")
    assert (line["receipt"], line["task"], line["side"]) == (mine["id"], mine["task"], "spent")
    month = line["ended_at"][:7]
    assert mine["task"] in typed("usage", "--charges", "--csv")
    for by in ("gpu", "node", "month", "team"):
        rows = {row["side"]: row for row in listed("usage", "--by", by)}
        assert set(rows) == {"used", "spent"}
        assert (rows["used"]["attempts"], rows["spent"]["attempts"]) == (1, 1)
        assert rows["spent"]["microcredits"] == mine["amount_microcredits"]
    assert {row["group"] for row in listed("usage", "--by", "project")} == {"thesis"}
    assert typed("usage", "--by", "month", "--csv").splitlines()[1].startswith(f"used,{month},1,")
    assert [row["group"] for row in listed("usage", "--by", "task")] == [mine["task"]]
    typed("usage", "--charges", "--by", "gpu", code=2)
    page = tmp_path / "invoice.html"
    typed("invoice", "--month", month, "-o", str(page))
    text = page.read_text()
    assert f"/receipts/{mine['id']}" in text
    assert f"/tasks/{mine['task']}#steps" in text
    assert "<script" not in text
    share = mine["amount_microcredits"] - mine["fee_microcredits"]

    def vested() -> bool:
        return bool(priced.json("earnings")["vested_microcredits"] == share)

    eventually("the earning vests", vested, PATIENCE_S)
    assert "vested" in priced.gpool("earnings").stdout
    assert priced.gpool("admin", "payout", "close", "--period", month).returncode == 1
    assert priced.json("payout", "ls") == []
    assert priced.gpool("admin", "receipt-keys", "rotate").returncode == 0
    typed("receipt", "fetch-keys", "-o", str(keys))
    priced.agents["lent"].stop()
    priced.ask("DELETE", f"/v1/nodes/{mine['node']}")
    assert priced.json("admin", "ledger", "verify")["sound"] is True
    priced.server.stop()
    assert "Valid receipt." in typed("receipt", "verify", str(file), "--keys", str(keys))
    data = file.read_bytes()
    file.write_bytes(data.replace(b'"amount":', b'"amount":1', 1))
    typed("receipt", "verify", str(file), "--keys", str(keys), code=1)
