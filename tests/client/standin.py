"""A stand-in for server and node in memory, for tests that break responses off or choose a task's end.

It passes the contract of the real application: `test_contract` runs the same tests on both.
"""

from __future__ import annotations

import base64
import hashlib
import json
import pickle
import threading
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import cloudpickle
import httpx2

from gpool.agent.runner import encoding
from gpool.client.values import RESULTS_AS_DATA
from gpool.core.ids import encode


class Pieces(httpx2.SyncByteStream):
    def __init__(self, pieces: Iterator[bytes]) -> None:
        self._pieces = pieces

    def __iter__(self) -> Iterator[bytes]:
        return self._pieces


@dataclass
class Batch:
    id: str
    tasks: list[str] = field(default_factory=list)
    results: list[dict[str, Any]] = field(default_factory=list)
    closed: bool = False

    def document(self) -> dict[str, Any]:
        total, done = len(self.tasks), len(self.results)
        return {
            "id": self.id,
            "name": "task",
            "total": total,
            "done": done,
            "closed": self.closed,
            "created_at": "2026-01-01T00:00:00Z",
        }


class Pool(httpx2.BaseTransport):
    """`break_after` results a stream is cut off; `refuse` answers so many requests with a dropped connection."""

    def __init__(self, *, break_after: int | None = None, runs: bool = True) -> None:
        self.artifacts: dict[str, bytes] = {}
        self.batches: dict[str, Batch] = {}
        self.tasks: dict[str, dict[str, Any]] = {}
        self.logs: dict[str, list[tuple[str, str]]] = {}
        self.requests: list[tuple[str, str, dict[str, str]]] = []
        self.answers: dict[str, httpx2.Response] = {}
        self.bodies: list[dict[str, Any]] = []
        self.cancelled: list[str] = []
        self.preempted: list[str] = []
        self.progress: list[dict[str, Any]] = []
        self.silences = 0  # while nothing happens
        self.teams: list[dict[str, Any]] = []
        self.sentence = "No node has a GPU."
        self.refuse = 0
        self.too_many: list[int] = []  # Retry-After of the next answers, in seconds
        self.more_running = False
        self.lose_answers = 0
        self.break_after = break_after
        self.runs = runs
        self.own_node: bool | None = True  # None: an older server, which does not report it
        self.node_name = "stand-in"
        self.forged = b""  # sent by the node in the place of every value
        self.command: Callable[[dict[str, Any]], dict[str, Any]] = lambda _: {}
        self._change = threading.Condition()
        self._numbers = iter(range(1, 1 << 40))

    def close(self) -> None:
        return

    def handle_request(self, request: httpx2.Request) -> httpx2.Response:
        method, path = request.method, request.url.path
        self.requests.append((method, str(request.url), dict(request.headers)))
        if self.refuse:
            self.refuse -= 1
            raise httpx2.ConnectError("connection refused")
        if request.headers.get("authorization") != "Bearer gpk_test":
            return problem(401, "not_signed_in", "no such key")
        if self.too_many:
            after = self.too_many.pop(0)
            return problem(429, "too_many", f"try again in {after} s", retry_after=after)
        body = request.read()
        key = request.headers.get("idempotency-key")
        if key is not None and key in self.answers:
            return self.answers[key]
        answer = self._route(method, path, request, body)
        if key is not None:
            self.answers[key] = answer
        if self.lose_answers and method == "POST":
            self.lose_answers -= 1
            raise httpx2.ReadError("connection reset")
        return answer

    def _route(
        self, method: str, path: str, request: httpx2.Request, body: bytes
    ) -> httpx2.Response:
        parts = path.removeprefix("/v1/").split("/")
        match method, parts:
            case "HEAD", ["artifacts", sha256]:
                return httpx2.Response(200 if sha256 in self.artifacts else 404)
            case "PUT", ["artifacts", sha256]:
                assert hashlib.sha256(body).hexdigest() == sha256
                self.artifacts[sha256] = body
                return httpx2.Response(201)
            case "GET", ["artifacts", sha256]:
                if sha256 not in self.artifacts:
                    return problem(404, "not_found", "no such artifact")
                return self._bytes(self.artifacts[sha256], request)
            case "POST", ["tasks"]:
                return self._submit(json.loads(body), "wait" in request.url.params)
            case "GET", ["tasks"]:
                return self._listed(request.url.params)
            case "GET", ["queue"]:
                return self._queue(int(request.url.params["limit"]))
            case "GET", ["tasks", id_] if id_ in self.tasks:
                return httpx2.Response(200, json=document_of(self.tasks[id_]))
            case "DELETE", ["tasks", id_] if id_ in self.tasks:
                self.cancelled.append(id_)
                self.tasks[id_]["status"] = "cancelled"
                return httpx2.Response(200, json=document_of(self.tasks[id_]))
            case "POST", ["tasks", id_, "preempt"] if id_ in self.tasks:
                self.preempted.append(id_)
                return httpx2.Response(200, json=document_of(self.tasks[id_]))
            case "DELETE", ["batches", id_]:
                self.cancelled.append(id_)
                return httpx2.Response(204)
            case "GET", ["batches", id_] if id_ in self.batches:
                found = self.batches[id_]
                if "counts" not in request.url.params:
                    return httpx2.Response(200, json=found.document())
                ends = [result["status"] for result in found.results]
                words = ("succeeded", "failed", "cancelled")
                counts = {word: ends.count(word) for word in words} | {"running": 0}
                return httpx2.Response(200, json=found.document() | counts)
            case "GET", ["tasks", id_, "result"] if id_ in self.tasks:
                for result in self.batches[self.tasks[id_]["batch"]].results:
                    if result["id"] == id_:
                        return httpx2.Response(200, json=result)
                return httpx2.Response(202, json=document_of(self.tasks[id_]))
            case "GET", ["tasks", id_, "explain"] if id_ in self.tasks:
                return httpx2.Response(
                    200, json={"id": id_, "status": "queued", "sentence": self.sentence}
                )
            case "GET", ["tasks", id_, "logs"] if id_ in self.tasks:
                return self._logs(id_, request)
            case "GET", ["batches", id_, "results"]:
                after = int(request.url.params["after"])
                return httpx2.Response(200, stream=Pieces(self._stream(self.batches[id_], after)))
            case "GET", ["teams"]:
                return httpx2.Response(200, json={"items": self.teams, "next": None})
            case "GET", ["me"]:
                return httpx2.Response(
                    200,
                    json={
                        "id": "u-0000000000001",
                        "name": "ada",
                        "wallets": [],
                        "permissions": ["consumer"],
                    },
                )
            case _:
                return problem(404, "not_found", f"nothing at {path}")

    def _queue(self, limit: int) -> httpx2.Response:
        waiting = [task for task in self.tasks.values() if task["status"] == "queued"]
        why = {"status": "queued", "sentence": self.sentence}
        items = [{"task": task, "explain": {"id": task["id"], **why}} for task in waiting[:limit]]
        held = [task for task in self.tasks.values() if task["status"] in ("leased", "running")]
        page = {"items": items, "next": None, "waiting": len(waiting), "running": held}
        page["more_running"] = self.more_running
        return httpx2.Response(200, json=page)

    def _bytes(self, content: bytes, request: httpx2.Request) -> httpx2.Response:
        start = int(request.headers.get("range", "bytes=0-")[6:].rstrip("-"))
        cut = self.break_after

        def pieces() -> Iterator[bytes]:
            if cut is not None and len(content) - start > cut:
                yield content[start : start + cut]
                raise httpx2.ReadError("connection reset")
            yield content[start:]

        return httpx2.Response(206 if start else 200, stream=Pieces(pieces()))

    def _logs(self, id_: str, request: httpx2.Request) -> httpx2.Response:
        after = int(request.url.params.get("after", 0))
        items = [
            {"cursor": at, "epoch": 1, "stream": stream, "text": text}
            for at, (stream, text) in enumerate(self.logs.get(id_, []), 1)
            if at > after
        ]
        if request.headers.get("accept") != "text/event-stream":
            return httpx2.Response(200, json={"items": items, "next": None, "ended": True})
        cut = self.break_after

        def events() -> Iterator[bytes]:
            yield b": hello\n\n"
            for document in self.progress:
                yield f"event: progress\ndata: {json.dumps(document)}\n\n".encode()
            if self.progress:
                yield b": still here\n\n" * self.silences
            for item in items[:cut]:
                yield f"id: {item['cursor']}\ndata: {json.dumps(item)}\n\n".encode()
            if cut is not None and len(items) > cut:
                raise httpx2.ReadError("connection reset")
            yield b"event: end\ndata: {}\n\n"

        return httpx2.Response(200, stream=Pieces(events()))

    def _listed(self, asked: httpx2.QueryParams) -> httpx2.Response:
        """Newest first, page by page."""
        limit, after = int(asked.get("limit", 50)), asked.get("cursor", "~")
        found = [
            document_of(task)
            for task in reversed(self.tasks.values())
            if task["id"] < after
            and task["status"] in asked.get("status", task["status"])
            and (asked.get("first") != "true" or task["position"] == 0)
        ]
        next_ = found[limit - 1]["id"] if len(found) > limit else None
        batches = [self.batches[one["batch"]].document() for one in found[:limit]]
        page = {"items": found[:limit], "next": next_}
        return httpx2.Response(200, json=page | ({"batches": batches} if "first" in asked else {}))

    def _submit(self, document: dict[str, Any], wait: bool) -> httpx2.Response:
        named = document.get("function", {}).get("sha256")
        if named is not None and named not in self.artifacts:
            return problem(422, "unprocessable", "1 artifact is missing", missing=[named])
        self.bodies.append(document)
        batch_id = document.get("batch")
        if batch_id is None:
            batch_id = encode("batch", next(self._numbers))
            self.batches[batch_id] = Batch(batch_id)
        batch = self.batches[batch_id]
        ids = []
        for call in document.get("calls", [None]):
            id_ = encode("task", next(self._numbers))
            ids.append(id_)
            self.tasks[id_] = {
                "id": id_,
                "name": document.get("name") or "task",
                "kind": "function" if "function" in document else "command",
                "status": "queued",
                "created_at": "2026-01-01T00:00:00Z",
                "batch": batch_id,
                "position": len(batch.tasks),
                "document": document,
                "call": call,
            }
            batch.tasks.append(id_)
        with self._change:
            batch.closed = not document.get("more", False)
            if self.runs:
                for id_ in ids:
                    self._run(batch, self.tasks[id_])
            self._change.notify_all()
        if wait and self.runs:
            return httpx2.Response(200, json=batch.results[-len(ids) :])
        first = len(batch.tasks) - len(ids)
        answer = {"batch": batch_id, "first_position": first, "ids": ids}
        on = document.get("on", "anyone")
        return httpx2.Response(202, json=answer if on == "anyone" else answer | {"on": on})

    def _run(self, batch: Batch, task: dict[str, Any]) -> None:
        result = {
            "id": task["id"],
            "position": task["position"],
            "sequence": len(batch.results) + 1,
            "status": "succeeded",
            "reason": "returned",
        }
        if self.own_node is not None:
            result |= {
                "node": encode("node", 1),
                "node_name": self.node_name,
                "own_node": self.own_node,
            }
        document = task["document"]
        if task["kind"] == "command":
            result |= {"reason": "exited", "exit_code": 0} | self.command(task)
        else:
            sent = self.artifacts[document["function"]["sha256"]]
            function, as_data = pickle.loads(sent), sent.endswith(RESULTS_AS_DATA)
            call = task["call"]
            payload = (
                base64.b64decode(call)
                if isinstance(call, str)
                else self.artifacts[call["payload_sha256"]]
            )
            args, kwargs = pickle.loads(payload)
            try:
                returned = function(*args, **kwargs)
                dumps = cloudpickle.dumps
                value = encoding.encode(returned, dumps) if as_data else dumps(returned)
            except (ValueError, ZeroDivisionError, KeyError) as exc:
                value = encoding.encode_exception(exc) if as_data else cloudpickle.dumps(exc)
                result |= {
                    "status": "failed",
                    "reason": "raised",
                    "error_text": traceback.format_exc(),
                }
            value = self.forged or value
            if len(value) > 64 * 1024:
                sha256 = hashlib.sha256(value).hexdigest()
                self.artifacts[sha256] = value
                result["value_sha256"] = sha256
            else:
                result["value"] = base64.b64encode(value).decode()
        task["status"] = result["status"]
        batch.results.append(result)

    def _stream(self, batch: Batch, after: int) -> Iterator[bytes]:
        sent = 0
        while True:
            with self._change:
                known = after
                self._change.wait_for(
                    lambda known=known: len(batch.results) > known or batch.closed, 10
                )
                fresh = batch.results[after:]
            if self.break_after is not None:
                fresh = fresh[: self.break_after - sent]
            if fresh:
                text = "".join(json.dumps(result) + "\n" for result in fresh).encode()
                middle = len(text) // 2  # a line may be cut anywhere
                yield text[:middle]
                yield text[middle:] + b"\n"
            after += len(fresh)
            sent += len(fresh)
            if batch.closed and after == len(batch.tasks):
                return
            if self.break_after is not None and sent >= self.break_after:
                raise httpx2.ReadError("connection reset")


def document_of(task: dict[str, Any]) -> dict[str, Any]:
    """The task as its route shows it."""
    shown = {name: value for name, value in task.items() if name not in ("document", "call")}
    return shown | {"status_text": task["status"], "user": "u-0000000000001", "epoch": 0}


def problem(status: int, code: str, detail: str, **members: object) -> httpx2.Response:
    return httpx2.Response(
        status,
        json={"title": code, "status": status, "code": code, "detail": detail, **members},
        headers={"content-type": "application/problem+json"},
    )
