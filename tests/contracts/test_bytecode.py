"""The committed bytecode is what the committed source compiles to."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from gpool.wallet.transactions import CLAIM, ERRORS, PUBLISH
from tests.tools.components import CONTRACTS


def check(folder: Path) -> subprocess.CompletedProcess[str]:
    command = ["node", "build.js", "--check"]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)


def test_the_bytecode_is_reproduced_from_the_source(
    require: Callable[[str], None], tmp_path: Path
) -> None:
    """In a copy of the folder elsewhere; the control is a changed source."""
    require("solc")
    for name in ("Distributor.sol", "TestToken.sol", "Distributor.json", "TestToken.json"):
        shutil.copy(CONTRACTS / name, tmp_path)
    for name in ("build.js", "package.json"):
        shutil.copy(CONTRACTS / name, tmp_path)
    (tmp_path / "node_modules").symlink_to(CONTRACTS / "node_modules")
    done = check(tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    source = (tmp_path / "Distributor.sol").read_text()
    assert "cumulative <= before" in source
    weaker = source.replace("if (cumulative <= before) return 0;", "if (cumulative < 1) return 0;")
    (tmp_path / "Distributor.sol").write_text(weaker)
    changed = check(tmp_path)
    assert changed.returncode == 1
    assert "Distributor.json is not what Distributor.sol compiles to" in changed.stderr


def signatures(kind: str) -> set[str]:
    abi = json.loads((CONTRACTS / "Distributor.json").read_text())["abi"]
    return {
        f"{each['name']}({','.join(one['type'] for one in each['inputs'])})"
        for each in abi
        if each["type"] == kind
    }


def test_the_command_line_knows_the_calls_and_errors_of_the_contract() -> None:
    assert {CLAIM, PUBLISH, "activate()", "stop()"} <= signatures("function")
    of_deployment_or_token = {"BadDeployment()", "SafeERC20FailedOperation(address)"}
    assert signatures("error") - of_deployment_or_token == set(ERRORS)


def test_versions_are_pinned_and_no_lock_names_an_address() -> None:
    package = json.loads((CONTRACTS / "package.json").read_text())
    built = json.loads((CONTRACTS / "Distributor.json").read_text())
    pins = package["devDependencies"]
    assert all(re.fullmatch(r"\d+\.\d+\.\d+", version) for version in pins.values())
    assert built["compiler"].partition("+")[0] == pins["solc"]
    assert built["openzeppelin"] == pins["@openzeppelin/contracts"]
    locks = [path.name for path in CONTRACTS.iterdir() if "lock" in path.name]
    assert locks == []


@pytest.mark.parametrize("name", ["Distributor", "TestToken"])
def test_the_source_names_the_pinned_compiler(name: str) -> None:
    built = json.loads((CONTRACTS / f"{name}.json").read_text())
    version = built["compiler"].partition("+")[0]
    assert f"pragma solidity {version};" in (CONTRACTS / f"{name}.sol").read_text()
