"""Schemathesis over the OpenAPI description: whatever fits it, and much that does not, never a fault of ours."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis.errors import Unsatisfiable
from schemathesis.checks import not_a_server_error
from schemathesis.generation import GenerationMode

from tests.server.server_desk import Live, serving
from tests.tools.processes import PATIENCE_S

EXAMPLES = 10


@pytest.mark.slow
@pytest.mark.parametrize("mode", [GenerationMode.POSITIVE, GenerationMode.NEGATIVE])
def test_no_input_makes_the_server_fail(data: Path, mode: GenerationMode) -> None:
    with serving(data, max_wait_s=0.01) as live:
        probe(live, mode)


def probe(live: Live, mode: GenerationMode) -> None:
    schema = schemathesis.openapi.from_url(f"{live.url}/openapi.json", timeout=PATIENCE_S)
    tried = 0
    for found in schema.get_all_operations():
        operation = found.ok()  # type: ignore[union-attr]

        @settings(
            max_examples=EXAMPLES,
            deadline=None,
            database=None,
            derandomize=True,
            phases=[Phase.generate],
            suppress_health_check=list(HealthCheck),
        )
        @given(case=operation.as_strategy(generation_mode=mode))
        def check(case: Any) -> None:
            answer = case.call(headers=live.headers, timeout=PATIENCE_S)
            case.validate_response(answer, checks=[not_a_server_error])

        with suppress(Unsatisfiable):  # nothing to get wrong in this one
            check()
        tried += 1
    assert tried > 30
