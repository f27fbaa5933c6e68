"""What is imported when: the SDK without the wallet extra never notices this room."""

from __future__ import annotations

import subprocess
import sys

import pytest


def loaded_by(code: str) -> set[str]:
    """Which of the extra's packages a fresh interpreter has loaded after this code."""
    script = (
        f"import sys\n{code}\nprint(*({{'coincurve', 'Crypto', 'msgspec'}} & set(sys.modules)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    return set(done.stdout.split())


@pytest.mark.parametrize(
    ("module", "packages"),
    [
        ("gpool.wallet", set()),
        ("gpool.wallet.errors", set()),
        ("gpool.wallet.moments", set()),
        ("gpool.wallet.signing", {"Crypto", "coincurve"}),
        ("gpool.wallet.signin", {"Crypto", "coincurve"}),
        ("gpool.wallet.crypto", {"Crypto", "coincurve"}),
        ("gpool.wallet.keystore", {"Crypto", "coincurve", "msgspec"}),
        ("gpool.wallet.canonical_json", {"msgspec"}),
        ("gpool.wallet.receipt_keys", {"msgspec"}),
        ("gpool.wallet.receipt_work", {"msgspec"}),
        ("gpool.wallet.payouts", {"Crypto", "coincurve", "msgspec"}),
    ],
)
def test_a_module_loads_only_what_it_needs(module: str, packages: set[str]) -> None:
    assert loaded_by(f"import {module}") == packages


@pytest.mark.parametrize(
    ("missing", "module"),
    [("coincurve", "gpool.wallet.signing"), ("Crypto", "gpool.wallet.signin")],
)
def test_without_the_extra_the_error_says_what_to_install(missing: str, module: str) -> None:
    code = f"import sys; sys.modules[{missing!r}] = None; import {module}"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "pip install 'gpool[wallet]'" in done.stderr
