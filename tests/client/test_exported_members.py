"""The public API is a list; changing it is a decision, not an accident."""

from __future__ import annotations

import subprocess
import sys

import pytest

import gpool

PUBLIC = [
    "Cancelled",
    "Client",
    "Completed",
    "Conflict",
    "Executor",
    "Forbidden",
    "GpoolError",
    "Invalid",
    "LosesNodes",
    "NotFound",
    "NotSignedIn",
    "RemoteTraceback",
    "Run",
    "Task",
    "TaskFailed",
    "TimedOut",
    "Unreachable",
    "UntrustedResult",
    "__version__",
    "local_files",
    "progress",
    "run",
    "task",
    "tqdm",
]


def test_the_public_names_are_these_and_all_of_them_load() -> None:
    assert gpool.__all__ == PUBLIC
    for name in PUBLIC:
        assert getattr(gpool, name) is not None


def test_importing_gpool_loads_neither_http_nor_pydantic() -> None:
    code = "import gpool, sys; print(sorted({'httpx2', 'pydantic', 'cloudpickle', 'click', 'rich'} & set(sys.modules)))"
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert said.stdout.strip() == "[]"


def test_the_sdk_never_loads_pydantic_or_the_server() -> None:
    code = (
        "import gpool, sys; gpool.Client, gpool.task, gpool.run; "
        "print([m for m in sys.modules if m.startswith(('pydantic', 'gpool.server', 'gpool.agent'))])"
    )
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert said.stdout.strip() == "[]"


def test_a_name_of_other_libraries_is_answered_with_ours() -> None:
    with pytest.raises(AttributeError, match=r"gpool has no 'function'; that is @gpool.task here"):
        gpool.__getattr__("function")
    with pytest.raises(AttributeError, match=r"gpool has no 'xyzzy'$"):
        gpool.__getattr__("xyzzy")
    assert not hasattr(gpool, "gather")
