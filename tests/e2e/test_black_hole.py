"""A node on which no sandbox starts, beside a good one: everything given to it is done all the same."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from gpool.agent.runtime.bubblewrap.runtime import find_bwrap
from tests.tools.processes import LONG_LEASE, PATIENCE_S, Pool, eventually

BROKEN = "#!/bin/sh\necho 'bwrap: No permissions to create a new namespace' >&2\nexit 1\n"
TASKS = 30


@pytest.fixture
def pool(tmp_path: Path) -> Iterator[Pool]:
    pool = Pool(tmp_path, LONG_LEASE)
    try:
        pool.start(agents=())
        yield pool
    finally:
        pool.stop()


@pytest.mark.slow
def test_thirty_tasks_are_done_beside_a_node_that_starts_none(
    require: Callable[[str], None], pool: Pool, tmp_path: Path
) -> None:
    require("root")  # who else mounts something over bwrap
    broken = tmp_path / "bwrap"
    broken.write_text(BROKEN)
    broken.chmod(0o755)
    hide = f'mount --bind {broken} {find_bwrap()} && exec "$@"'
    pool.join("hole", within=("unshare", "--mount", "sh", "-c", hide, "sh"))
    alone = pool.ask("POST", "/v1/tasks", {"command": ["true"]}).json()["ids"]
    eventually(
        "the node has noticed that it starts nothing",
        lambda: bool(pool.ask("GET", "/v1/nodes").json()["items"][0]["problems"]),
        PATIENCE_S,
    )
    pool.join("good")
    more = [
        pool.ask("POST", "/v1/tasks", {"command": ["true"]}).json()["ids"][0] for _ in range(TASKS)
    ]

    def document(name: str) -> dict[str, object]:
        found: dict[str, object] = pool.ask("GET", f"/v1/tasks/{name}").json()
        return found

    names = [*alone, *more]
    eventually(
        "all are over", lambda: all(document(name)["finished_at"] for name in names), 3 * PATIENCE_S
    )
    told = [document(name) for name in more]
    assert {each["status"] for each in told} == {"succeeded"}
    assert {each["node_name"] for each in told} == {"good"}
    assert {each["tries"] for each in told} == {0}
