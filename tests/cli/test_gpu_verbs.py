"""Owners' verbs for single GPUs, against a real server on loopback."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import pytest
from click.testing import CliRunner, Result

from gpool.cli.listings import gpu_notes, node_notes
from gpool.cli.main import cli
from gpool.cli.pool import show_top
from tests.server.server_desk import Live, serving
from tests.tools.processes import PATIENCE_S


class Owner:
    """The operator, who has registered a machine with two GPUs under their account."""

    def __init__(self, live: Live, folder: Path) -> None:
        self._live, self._home = live, folder / "home"
        self._key = live.key
        gpus = [
            {
                "index": n,
                "uuid": f"GPU-{n}",
                "model": "H200",
                "vendor": "nvidia",
                "memory_bytes": 1 << 37,
            }
            for n in range(2)
        ]
        self.ask("POST", "/v1/nodes", {"name": "studio", "cpu_milli": 1000, "gpus": gpus})

    def ask(self, method: str, path: str, document: object = None) -> Any:
        headers = {"Authorization": f"Bearer {self._key}"}
        with httpx2.Client(trust_env=False, timeout=PATIENCE_S) as http:
            answer = http.request(method, self._live.url + path, headers=headers, json=document)
        return answer.raise_for_status().json()

    def __call__(self, *words: str, code: int = 0) -> Result:
        environment = {
            "GPOOL_HOME": str(self._home),
            "GPOOL_URL": self._live.url,
            "GPOOL_KEY": self._key,
        }
        result = CliRunner().invoke(cli, words, env=environment)
        assert result.exit_code == code, result.output
        return result

    def gpu(self, index: int) -> dict[str, Any]:
        found = json.loads(self("gpus", "--json").stdout)
        return next(one for one in found if one["kind"] == "gpu" and one["index"] == index)


@pytest.fixture
def owner(tmp_path: Path) -> Iterator[Owner]:
    with serving(tmp_path / "data") as live:
        yield Owner(live, tmp_path)


def test_one_gpu_is_paused_and_resumed_by_its_short_name(owner: Owner) -> None:
    owner("node", "pause", "gpu1")
    assert [owner.gpu(n)["available"] for n in range(2)] == [True, False]
    owner("node", "resume", "studio/gpu1")
    assert owner.gpu(1)["available"] is True
    owner("node", "pause", "gpu0", "--now")
    assert owner.gpu(0)["available"] is False


def test_an_unknown_gpu_is_reported_with_the_existing_ones(owner: Owner) -> None:
    told = owner("node", "pause", "gpu7", code=4)
    assert "gpu0, gpu1" in told.output


def test_now_reclaims_single_gpus_only(owner: Owner) -> None:
    owner("node", "pause", "studio", "--now", code=2)


def test_resuming_a_gpu_ends_its_quarantine(owner: Owner) -> None:
    sick = owner.gpu(0)["id"]
    owner.ask("PATCH", f"/v1/resources/{sick}", {"quarantined": "it smells of smoke"})
    listed = owner("gpus")
    assert "it smells of smoke" in listed.stderr
    assert "it smells of smoke" in owner("node", "ls").stderr
    owner("node", "resume", "gpu0")
    assert owner.gpu(0)["quarantined"] is None


def test_the_listing_has_a_column_for_each_reading(owner: Owner) -> None:
    heading = owner("gpus").stdout.splitlines()[0].lower()
    for word in ("busy", "used", "watts", "°c"):
        assert word in heading


def test_top_shows_every_gpu_once_or_as_json(owner: Owner) -> None:
    lines = owner("top", "--once").stdout.splitlines()
    assert lines[0].startswith("2 GPUs: 0 with tasks, ")
    assert [line.split()[0] for line in lines[2:]] == ["studio/gpu0", "studio/gpu1"]
    found = json.loads(owner("top", "--json").stdout)
    assert [(one["index"], one["tasks"]) for one in found] == [(0, []), (1, [])]
    owner("top", "--once", "--everybody")


def test_a_table_of_top_fits_80_columns(capsys: pytest.CaptureFixture[str]) -> None:
    reading = {"utilisation_percent": 100, "memory_used_bytes": 90 << 30, "temperature_celsius": 71}
    gpu = {
        "node": "n-0123456789abc",
        "node_name": "workstation-7",
        "model": "RTX4090",
        "simulated": True,
        "status": "busy",
        "memory_bytes": 140 << 30,
        "memory_free_bytes": 0,
        "reading": reading,
    }
    gpus = [{**gpu, "index": n} for n in range(9, 11)]
    task = {"id": "t-0123456789abc", "user": "u-0123456789abc"}
    tasks = {("n-0123456789abc", 9): [task, task]}
    show_top(gpus, tasks, {"u-0123456789abc": "ada.lovelace"}, width=80)
    out = capsys.readouterr().out
    assert max(map(len, out.splitlines())) <= 80
    for text in ("100 %", "90/140 GiB", "71", "+1", "ada.lovelace", "(simulated)"):
        assert text in out
    assert "100 % utilised on average" in out


def test_gpus_that_passed_no_verification_are_marked(owner: Owner) -> None:
    assert "(unverified)" in owner("gpus").stdout


def test_gpu_memory_is_formatted_as_in_explain(owner: Owner) -> None:
    """Not 128 GB here and 137GB there."""
    assert "128 GiB" in owner("gpus").stdout


def test_an_untested_gpu_is_noted_beneath_both_lists_and_a_tested_one_is_not() -> None:
    gpus = [{"index": 0, "untested": True}, {"index": 1, "untested": False}]
    assert [len(gpu_notes(gpu)) for gpu in gpus] == [1, 0]
    [note] = node_notes({"gpus": gpus})
    assert note == f"gpu0 {gpu_notes(gpus[0])[0]}"
    assert "only for its owner and the owner's teams" in note
    sick = {"index": 2, "closed": "in quarantine", "ails": "hot", "health": "degraded"}
    assert gpu_notes({**sick, "untested": True})[0] == "takes no tasks: in quarantine"
    assert len(gpu_notes(sick)) == 1
