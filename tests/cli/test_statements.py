"""Statements: cells are no formulas, pages have no script, sums are right and grouped as asked for."""

from __future__ import annotations

import csv
import io
from typing import Any

import pytest

from gpool.cli.market.statements import csv_cell, earned_or_spent, to_csv, to_html
from gpool.cli.market.usage import UsageSums, charge_group


def line(**changes: Any) -> dict[str, Any]:
    found = {
        "side": "spent",
        "ended_at": "2026-11-18T09:00:00Z",
        "started_at": None,
        "task": "t-0000000000001",
        "attempt": 1,
        "node": "n-0000000000002",
        "user": None,
        "team": None,
        "project": None,
        "gpus": ["H100"],
        "charged_s": 10.0,
        "price_microcredits": 3_600_000,
        "amount_microcredits": 10_000,
        "fee_microcredits": 1_000,
        "end_reason": "exited",
        "state": "vested",
        "receipt": "rc-0000000000003",
    }
    return found | changes


@pytest.mark.parametrize("text", ["=1+1", "+1", "-1", "@SUM(A1)", "\t=1", "\r=1", "\n=1"])
def test_a_cell_is_never_a_formula(text: str) -> None:
    assert csv_cell(text) == "'" + text.strip()
    [_, row] = list(csv.reader(io.StringIO(to_csv([line(gpus=[text])]))))
    assert not any(cell.startswith(("=", "+", "-", "@", "\t", "\r", "\n")) for cell in row)


def test_csv_has_one_row_for_each_charge_with_receipt_and_task() -> None:
    [found] = csv.DictReader(io.StringIO(to_csv([line()])))
    assert (found["task"], found["receipt"]) == ("t-0000000000001", "rc-0000000000003")
    assert (found["amount_microcredits"], found["user"]) == ("10000", "")


def test_a_page_escapes_every_value_and_sums_up() -> None:
    evil = "<script>alert(1)</script>"
    lines = [line(gpus=[evil]), line(task=evil, state="forfeited")]
    page = to_html(lines, evil, "2026-11", "https://pool.test/")
    assert "<script" not in page
    assert "&lt;script&gt;" in page
    assert "Total: 0.01 credits in 2 charges." in page
    assert "rc-0000000000003" in page


def test_a_line_of_an_invoice_links_receipt_task_and_timeline() -> None:
    page = to_html([line(), line(receipt=None)], "ada", "2026-11", "https://pool.test")
    assert page.count('<a href="https://pool.test/receipts/rc-0000000000003">') == 1
    assert page.count('<a href="https://pool.test/tasks/t-0000000000001">t-0000000000001</a>') == 2
    assert page.count('<a href="https://pool.test/tasks/t-0000000000001#steps">timeline</a>') == 2
    assert "not issued" in page


def test_a_link_cannot_leave_its_attribute() -> None:
    page = to_html([line(task='x"><b>', receipt="a b")], "ada", "2026-11", "https://pool.test")
    assert "<b>" not in page
    assert "/receipts/a%20b" in page


def test_an_owner_earns_the_amount_without_the_fee_and_nothing_of_a_forfeited_charge() -> None:
    assert earned_or_spent(line()) == 10_000
    assert earned_or_spent(line(side="earned")) == 9_000
    assert earned_or_spent(line(state="forfeited")) == 0


def test_charges_and_use_of_one_group_stay_apart() -> None:
    sums = UsageSums()
    for _ in range(2):
        sums.add_charge(line(), "H100")
    sums.add_charge(line(side="earned"), "H100")
    sums.add_use({"side": "used", "attempts": 5, "run_s": 50.0, "gpu_s": 25.0}, "H100")
    assert [tuple(row.values()) for row in sums.rows()] == [
        ("used", "H100", 5, 50.0, 25.0, None),
        ("spent", "H100", 2, 20.0, None, 20_000),
        ("earned", "H100", 1, 10.0, None, 9_000),
    ]


def test_a_charge_has_a_group_of_every_kind() -> None:
    one = line(gpus=["H100", "H100"], team="tm-1", project="thesis")
    kinds = ("gpu", "month", "team", "project", "user", "state")
    found = {by: charge_group(one, by) for by in kinds}
    assert found == {
        "gpu": "H100+H100",
        "month": "2026-11",
        "team": "tm-1",
        "project": "thesis",
        "user": "-",
        "state": "vested",
    }
    assert charge_group(line(gpus=[]), "gpu") == "-"
