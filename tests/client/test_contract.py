"""The contract of the server as the SDK relies on it: the same tests on the real application and on the stand-in."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator
from typing import Any

import httpx2
import pytest

import gpool
from gpool import Client
from gpool.wire.documents import (
    BatchDocument,
    ExplainDocument,
    LogPage,
    Problem,
    ResultDocument,
    SubmittedDocument,
    TaskDocument,
    TaskPage,
)
from tests.client.inprocess import RealPool
from tests.client.standin import Pool

COMMAND = {"command": ["true"]}


class Subject:
    """A pool under test; `prints` chooses how commands end from now on."""

    def __init__(
        self,
        transport: httpx2.BaseTransport,
        key: str,
        prints: Callable[[int, list[tuple[str, str]]], None],
    ) -> None:
        self.prints = prints
        self.client = Client("http://pool.test", key, transport=transport)
        self.http = httpx2.Client(
            transport=transport,
            base_url="http://pool.test",
            headers={"authorization": f"Bearer {key}"},
        )

    def submit(self, document: dict[str, Any], **headers: str) -> SubmittedDocument:
        answer = self.http.post("/v1/tasks", json=document, headers=headers)
        assert answer.status_code == 202, answer.text
        return SubmittedDocument.model_validate(answer.json())

    def ended(self, document: dict[str, Any]) -> ResultDocument:
        [id_] = self.submit(document).ids
        answer = self.http.get(f"/v1/tasks/{id_}/result?wait=30")
        assert answer.status_code == 200, answer.text
        return ResultDocument.model_validate(answer.json())

    def refused(self, method: str, path: str, **options: Any) -> Problem:
        answer = self.http.request(method, path, **options)
        assert answer.headers["content-type"] == "application/problem+json"
        found = Problem.model_validate(answer.json())
        assert found.status == answer.status_code
        return found


@pytest.fixture(scope="module")
def real(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Subject]:
    pool = RealPool(tmp_path_factory.mktemp("data"))
    node = pool.join()

    def prints(code: int, pieces: list[tuple[str, str]]) -> None:
        streams = {"stdout": 1, "stderr": 2}
        chunks = [(streams[stream], text.encode()) for stream, text in pieces]
        pool.command = lambda _: (code, chunks, {})

    yield Subject(pool.transport, pool.key, prints)
    node.close()
    pool.close()


def stand_in() -> Subject:
    pool = Pool()

    def prints(code: int, pieces: list[tuple[str, str]]) -> None:
        def command(task: dict[str, Any]) -> dict[str, Any]:
            pool.logs[task["id"]] = pieces
            return {"exit_code": code, "status": "failed" if code else "succeeded"}

        pool.command = command

    return Subject(pool, "gpk_test", prints)


@pytest.fixture(params=["real", "stand-in"])
def subject(request: pytest.FixtureRequest) -> Subject:
    if request.param == "stand-in":
        return stand_in()
    found: Subject = request.getfixturevalue("real")
    found.prints(0, [])
    return found


def test_a_task_has_a_document_a_result_and_a_batch(subject: Subject) -> None:
    subject.prints(3, [])
    submitted = subject.submit(COMMAND)
    [id_] = submitted.ids
    result = subject.http.get(f"/v1/tasks/{id_}/result?wait=30")
    found = ResultDocument.model_validate(result.json())
    assert (found.id, found.position, found.sequence) == (id_, 0, 1)
    assert (found.status, found.reason, found.exit_code) == ("failed", "exited", 3)
    task = TaskDocument.model_validate(subject.http.get(f"/v1/tasks/{id_}").json())
    assert (task.kind, task.status, task.batch) == ("command", "failed", submitted.batch)
    batch = BatchDocument.model_validate(subject.http.get(f"/v1/batches/{submitted.batch}").json())
    assert (batch.total, batch.done, batch.closed) == (1, 1, True)
    sentence = subject.http.get(f"/v1/tasks/{id_}/explain")
    assert ExplainDocument.model_validate(sentence.json()).id == id_


def test_a_repeated_submission_with_the_same_key_is_one_task(subject: Subject) -> None:
    keyed = {"idempotency-key": hashlib.sha256(b"once").hexdigest()[:32]}
    assert subject.submit(COMMAND, **keyed) == subject.submit(COMMAND, **keyed)


def test_a_function_the_server_has_not_is_named_as_missing(subject: Subject) -> None:
    sha256 = hashlib.sha256(b"never uploaded").hexdigest()
    function = {"sha256": sha256, "python": "3.11"}
    body = {"function": function, "calls": ["gAVdlC4="]}
    answer = subject.http.post("/v1/tasks", json=body)
    assert (answer.status_code, answer.json()["code"]) == (422, "unprocessable")
    assert answer.json()["missing"] == [sha256]


def test_unknown_tasks_and_keys_are_problems_with_a_code(subject: Subject) -> None:
    assert subject.refused("GET", "/v1/tasks/t-0000000000007").code == "not_found"
    wrong = {"authorization": "Bearer gpk_wrong"}
    assert subject.refused("GET", "/v1/tasks", headers=wrong).code == "not_signed_in"


def test_an_artifact_is_uploaded_once_and_read_in_ranges(subject: Subject) -> None:
    content = b"0123456789" * 100
    path = f"/v1/artifacts/{hashlib.sha256(content).hexdigest()}"
    assert subject.http.head(path).status_code == 404
    assert subject.http.put(path, content=content).status_code == 201
    assert subject.http.head(path).status_code == 200
    whole = subject.http.get(path)
    assert (whole.status_code, whole.content) == (200, content)
    rest = subject.http.get(path, headers={"range": "bytes=990-"})
    assert (rest.status_code, rest.content) == (206, content[990:])


def test_output_comes_in_pages_and_as_events_that_end(subject: Subject) -> None:
    subject.prints(0, [("stdout", "out\n"), ("stderr", "err\n")])
    id_ = subject.ended(COMMAND).id
    page = LogPage.model_validate(subject.http.get(f"/v1/tasks/{id_}/logs?after=0").json())
    assert [(item.stream, item.text) for item in page.items] == [
        ("stdout", "out\n"),
        ("stderr", "err\n"),
    ]
    assert page.ended
    after = page.items[0].cursor
    events = {"accept": "text/event-stream"}
    with subject.http.stream(
        "GET", f"/v1/tasks/{id_}/logs?after={after}", headers=events
    ) as answer:
        text = "".join(answer.iter_text())
    blocks = [block.splitlines() for block in text.split("\n\n") if "data: " in block]
    *progress_and_logs, end = blocks
    logs = [lines for lines in progress_and_logs if lines[0].startswith("id: ")]
    assert [json.loads(lines[1].removeprefix("data: "))["text"] for lines in logs] == ["err\n"]
    assert end == ["event: end", "data: {}"]


def test_listings_come_newest_first_page_by_page(subject: Subject) -> None:
    ids = [subject.ended(COMMAND).id for _ in range(3)]
    first = TaskPage.model_validate(subject.http.get("/v1/tasks?limit=2").json())
    assert [task.id for task in first.items] == [ids[2], ids[1]]
    following = subject.http.get(f"/v1/tasks?limit=2&cursor={first.next}")
    assert TaskPage.model_validate(following.json()).items[0].id == ids[0]


def test_the_results_of_a_batch_stream_in_order_of_completion(subject: Subject) -> None:
    half = subject.client.task(lambda x: 1 / x)
    found = list(half.map([1, 0, 2], return_exceptions=True))
    assert [type(value) for value in found] == [float, ZeroDivisionError, float]
    batch = subject.client.listing("tasks", limit=1)[0]["batch"]
    lines = subject.http.get(f"/v1/batches/{batch}/results?after=0").text.splitlines()
    results = [ResultDocument.model_validate_json(line) for line in lines if line]
    assert [result.sequence for result in results] == [1, 2, 3]
    assert {(result.status, result.reason) for result in results} == {
        ("succeeded", "returned"),
        ("failed", "raised"),
    }
    assert all(result.own_node and result.node for result in results)


def test_large_values_come_as_artifacts(subject: Subject) -> None:
    data = bytes(range(256)) * 1024
    run = subject.client.task(lambda d: d * 2).submit(data)
    assert run.result() == data * 2
    result = subject.http.get(f"/v1/tasks/{run.id}/result?wait=1").json()
    found = ResultDocument.model_validate(result)
    assert (found.value, len(found.value_sha256)) == ("", 64)


def test_the_caller_has_an_account_and_teams(subject: Subject) -> None:
    me = subject.http.get("/v1/me").json()
    assert {"id", "name", "wallets", "permissions"} <= set(me)
    assert subject.http.get("/v1/teams").json()["items"] == []
    with pytest.raises(gpool.NotFound, match="you are not in a team"):
        subject.client.team_id("attic")
