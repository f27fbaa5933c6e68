"""Schemathesis over the account routes as three people, with answers held to the schema, and in sequences of calls."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx2
import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis.errors import FlakyStrategyDefinition, Unsatisfiable
from hypothesis.stateful import run_state_machine_as_test
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    response_schema_conformance,
    status_code_conformance,
)

from tests.server.identity_routes.people_desk import PASSWORD, bearer
from tests.server.server_desk import Live, serving
from tests.tools.processes import PATIENCE_S

CHECKS = [not_a_server_error, response_schema_conformance, status_code_conformance]
ROOMS = ("auth", "users", "me", "keys", "wallets", "sessions", "teams")
STREAMS = r"/(results|logs|events)$"
"""Routes that answer until the task has ended, which none does without a node."""
HURRIED = settings(
    max_examples=5,
    deadline=None,
    database=None,
    derandomize=True,
    phases=[Phase.generate],
    suppress_health_check=list(HealthCheck),
)


def people(live: Live) -> dict[str, dict[str, str]]:
    """Nobody, somebody who is signed in, the operator."""
    account = {"name": "ada", "password": PASSWORD}
    httpx2.post(f"{live.url}/v1/users", json=account, timeout=PATIENCE_S).raise_for_status()
    tokens = httpx2.post(f"{live.url}/v1/auth/password", json=account, timeout=PATIENCE_S).json()
    return {"nobody": {}, "ada": bearer(tokens["access_token"]), "operator": live.headers}


def probe(operation: Any, headers: dict[str, str]) -> None:
    @HURRIED
    @given(case=operation.as_strategy())
    def check(case: Any) -> None:
        answer = case.call(headers=headers, timeout=PATIENCE_S)
        case.validate_response(answer, checks=CHECKS)
        assert "Traceback" not in answer.text

    with suppress(Unsatisfiable):
        check()


@pytest.mark.slow
def test_no_input_makes_an_account_route_fail_or_answer_off_schema(data: Path) -> None:
    with serving(data, max_wait_s=0.01) as live:
        schema = schemathesis.openapi.from_url(f"{live.url}/openapi.json", timeout=PATIENCE_S)
        tried = 0
        for name, headers in people(live).items():
            for found in schema.get_all_operations():
                operation = found.ok()  # type: ignore[union-attr]
                if not operation.path.startswith(tuple(f"/v1/{room}" for room in ROOMS)):
                    continue
                if name == "ada" and operation.path == "/v1/auth/logout":
                    continue  # the rest of the run needs the sign-in

                probe(operation, headers)
                tried += 1
        assert tried > 90


@pytest.mark.slow
def test_sequences_of_calls_never_make_the_server_fail(data: Path) -> None:
    with serving(data, max_wait_s=0.01) as live:
        headers = people(live)["operator"]
        whole = schemathesis.openapi.from_url(f"{live.url}/openapi.json", timeout=PATIENCE_S)
        schema = whole.exclude(path_regex=STREAMS)

        called: list[int] = []

        class Calls(schema.as_state_machine()):  # type: ignore[misc]
            def get_call_kwargs(self, case: Any) -> dict[str, Any]:
                return {"headers": headers, "timeout": PATIENCE_S}

            def validate_response(self, response: Any, case: Any, **more: Any) -> None:
                called.append(response.status_code)
                case.validate_response(response, checks=[not_a_server_error])

        for steps in (8, 9, 10):
            # The server remembers what earlier sequences did; that may look like a flaky strategy and end a round.
            with suppress(FlakyStrategyDefinition):
                run_state_machine_as_test(
                    Calls, settings=settings(HURRIED, max_examples=15, stateful_step_count=steps)
                )
        assert len(called) > 100
