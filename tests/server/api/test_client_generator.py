"""The OpenAPI document as a client generator reads it: `openapi-python-client` generates every endpoint, without a warning."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from gpool.server.api.routing import endpoints
from tests.server.server_desk import Desk

pytestmark = pytest.mark.anyio


async def test_a_client_is_generated_for_every_endpoint_without_a_warning(
    desk: Desk, tmp_path: Path, require: Callable[[str], None]
) -> None:
    require("openapi-python-client")
    document = desk.app.openapi()
    described = {
        operation["operationId"]
        for methods in document["paths"].values()
        for operation in methods.values()
    }
    assert generated_from(document, tmp_path) == described
    documented = [each for each in endpoints() if not each.is_page]
    assert len(described) == len(documented) - 2  # without the channel and the document itself


def generated_from(document: dict[str, Any], folder: Path) -> set[str]:
    """Names of the endpoints that were generated."""
    generator = Path(sys.executable).with_name("openapi-python-client")
    (folder / "openapi.json").write_text(json.dumps(document))
    path = f"{generator.parent}{os.pathsep}{os.environ['PATH']}"  # ruff formats what is generated
    options = ["--path", "openapi.json", "--output-path", "client", "--fail-on-warning"]
    done = subprocess.run(
        [generator, "generate", *options],
        cwd=folder,
        env={**os.environ, "PATH": path},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return {file.stem for file in folder.glob("client/*/api/*/*.py")} - {"__init__"}
