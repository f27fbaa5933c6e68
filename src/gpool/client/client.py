"""`Client`: one pool and one credential. Builds requests, decodes responses; `ApiTransport` sends.

One file because functions and commands share submission, credential and transport.
"""

from __future__ import annotations

import binascii
import contextlib
import itertools
import os
import re
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Unpack
from urllib.parse import quote, urlencode
from weakref import WeakKeyDictionary

import httpx2

from gpool.client import config, mapping, times
from gpool.client.artifacts import (
    Artifacts,
    Input,
    OwnData,
    TransferProgress,
    check_sent,
    gather,
)
from gpool.client.config import SessionFile, SignInSession
from gpool.client.local_files import shipment
from gpool.client.options import Options, TaskOptions
from gpool.client.runs import (
    ECHOED_AFTER_S,
    LONGEST_WAIT_S,
    Run,
    echo_log,
    echoed_result,
    wait_for,
)
from gpool.client.tasks import Decorator, MapResults, Task
from gpool.client.transport import ApiTransport, json_of
from gpool.client.values import (
    PYTHON,
    Completed,
    Raised,
    ReadingRules,
    Result,
    SubmittedBatch,
    TrustedTeams,
    decode_results,
    decode_submitted,
    dumps_call,
    exit_code,
    failure,
    outcome,
)
from gpool.core.errors import GpoolError, Invalid, NotFound, Unprocessable
from gpool.core.model import INLINE_LIMIT_BYTES
from gpool.core.specs.fields import checked_path
from gpool.transfer.requests import Reply

_READ_S = LONGEST_WAIT_S + 30.0
_INTERPRETER = re.compile(r"python[0-9.]*|sh|bash")
_SCRIPT = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,99}\.(?:py|sh)")
_JSON = {"content-type": "application/json"}


class Client:
    """Client of a pool; without arguments, of the configured one (`gpool up` configures a local one)."""

    def __init__(
        self,
        url: str | None = None,
        key: str | None = None,
        transport: httpx2.BaseTransport | None = None,
        *,
        patience_s: float = 60.0,
        trust: Sequence[str] | None = None,
        max_value: str | int | None = None,
    ) -> None:
        """`trust`: teams, as `team:NAME`, whose members' nodes may send pickles. `max_value`: size of a value from
        another account's node, `"1GiB"` or bytes. Without them: GPOOL_TRUST, GPOOL_MAX_VALUE, then the profile.
        """
        settings = config.load(url, key, trust=trust, max_value=max_value)
        self.url, self.project = settings.url, settings.project
        session = None
        if settings.session_file is not None and not settings.key:
            session = SignInSession(SessionFile(settings.session_file))
        self.session = session
        self.api = ApiTransport(
            settings.address, settings.key, transport, patience_s=patience_s, session=session
        )
        teams = TrustedTeams(settings.trust, self.api.get_json, self.team_id)
        self.rules = ReadingRules(settings.max_value_bytes, teams.include_owner_of)
        self.artifacts = Artifacts(self.api)
        self.data = OwnData(self.api)
        self.task = Decorator(lambda: self)
        """`@client.task(...)`: `@gpool.task` for this client."""
        self._heads: WeakKeyDictionary[Task[..., Any], tuple[bytes, bytes, bytes]] = (
            WeakKeyDictionary()
        )
        """Pickled function, pickled check or comparator, and start of the request, by task."""

    def __enter__(self) -> Client:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        self.api.close()

    # ---- functions

    def call(
        self, task: Task[..., Any], args: Sequence[object], kwargs: Mapping[str, object]
    ) -> Any:
        """Submit one call and wait for its value."""
        result = self._submit_and_wait(task, args, kwargs)
        value = outcome(
            result,
            self.artifacts.get,
            pickle_requested=task.options.pickle_requested,
            rules=self.rules,
        )
        if type(value) is Raised:
            raise value.exception
        return value

    def submit_call(
        self, task: Task[..., Any], args: Sequence[object], kwargs: Mapping[str, object]
    ) -> Run:
        reply = self._post(task, "/v1/tasks", lambda: self._one_call(task, args, kwargs))
        return Run(
            self,
            decode_submitted(reply.body).ids[0],
            function=True,
            own=True,
            pickle_requested=task.options.pickle_requested,
            echo=task.options.echoes,
        )

    def map(
        self,
        task: Task[..., Any],
        iterables: Sequence[Iterable[Any]],
        *,
        return_exceptions: bool = False,
        progress: bool = True,
        window: int = mapping.WINDOW,
    ) -> MapResults[Any]:
        """See `Task.map`."""
        stopped = threading.Event()
        rendered = (rendered_call(self, task, a, {}) for a in zip(*iterables))  # noqa: B905 - as builtin map

        due, pickle_requested = _deadline(task), task.options.pickle_requested
        ids: list[str] = []  # of the first call

        def submit(calls: list[bytes], batch: str | None, more: bool) -> str:
            accepted = submit_calls(self, task, calls, batch, more=more, due=due)
            ids.extend(accepted.ids[: 1 - len(ids)])
            return batch or accepted.batch

        def phase() -> str:
            with contextlib.suppress(GpoolError):  # not essential
                for id_ in ids:
                    return str(self.api.get_json(f"/v1/tasks/{id_}").get("phase") or "")
            return ""

        echo = mapping.MapEcho(lambda id_: echo_log(self, id_), task.options.echoes)

        def value_of(result: Result) -> object:
            echo.show(result)
            return outcome(
                result, self.artifacts.get, pickle_requested=pickle_requested, rules=self.rules
            )

        outcomes = mapping.stream(
            self.api,
            rendered,
            submit,
            value_of,
            self.cancel_batch,
            window=window,
            line=mapping.BatchLine(task.label, phase=phase, is_wanted=progress),
            is_stopped=stopped.is_set,
        )
        wrap = mapping.exceptions_as_values if return_exceptions else mapping.raise_first
        return MapResults(wrap(outcomes), stopped)

    def _submit_and_wait(
        self, task: Task[..., Any], args: Sequence[object], kwargs: Mapping[str, object]
    ) -> Result:
        echoes = task.options.echoes
        wait_s = ECHOED_AFTER_S if echoes else LONGEST_WAIT_S
        path = f"/v1/tasks?wait={wait_s:g}"
        reply = self._post(task, path, lambda: self._one_call(task, args, kwargs))
        if reply.status != 200:
            id_ = decode_submitted(reply.body).ids[0]
            return echoed_result(self, id_, wait_s) if echoes else wait_for(self, id_, None)
        result = decode_results(reply.body)[0]
        if echoes and result.printed:
            echo_log(self, result.id)
        return result

    def _post(self, task: Task[..., Any], path: str, body: Callable[[], bytes]) -> Reply:
        """Upload the function again if the server has deleted it as unused."""
        try:
            return self.api.send("POST", path, body=body(), headers=_JSON, read_s=_READ_S)
        except Unprocessable as error:
            missing = error.members.get("missing")
            if not isinstance(missing, list) or not self.artifacts.forget(missing):
                raise
            self._heads.pop(task, None)
        return self.api.send("POST", path, body=body(), headers=_JSON, read_s=_READ_S)

    def _one_call(
        self, task: Task[..., Any], args: Sequence[object], kwargs: Mapping[str, object]
    ) -> bytes:
        call = rendered_call(self, task, args, kwargs)
        return b"{%s%s%s]}" % (_deadline(task), self._head(task), call)

    def _head(self, task: Task[..., Any]) -> bytes:
        pickled, check = task.pickled(), task.pickled_check() or task.pickled_comparator()
        known, known_check, head = self._heads.get(task, (b"", b"", b""))
        if known is not pickled or known_check is not check:
            function = {"sha256": self.artifacts.put(pickled), "python": PYTHON}
            members = {**self._requested(task.options), "name": task.label, "function": function}
            if check:
                name = "check" if task.options.verify == "check" else "comparator"
                members[name] = self.artifacts.put(check)
            members.pop("by", None)  # "2h" counts from each call
            head = _members(members)[1:] + b',"calls":['
            self._heads[task] = pickled, check, head
        return head

    def _render(self, pickled: bytes) -> bytes:
        if len(pickled) <= INLINE_LIMIT_BYTES:
            return b'"%s"' % binascii.b2a_base64(pickled, newline=False)
        return b'{"payload_sha256":"%s"}' % self.artifacts.put(pickled).encode()

    def _requested(self, options: Options) -> dict[str, object]:
        members = options.members()
        if options.project is None and self.project:
            members["project"] = self.project
        return members if options.team is None else members | {"team": self.team_id(options.team)}

    def team_id(self, team: str) -> str:
        """Id of one of the caller's teams, by name or id."""
        if team.startswith("tm-"):
            return team
        for one in self.api.get_json("/v1/teams")["items"]:
            if one["name"] == team:
                return str(one["id"])
        raise NotFound(f"you are not in a team {team!r}; `gpool team ls` lists yours")

    # ---- commands

    def submit_command(
        self,
        command: Sequence[str],
        *,
        inputs: Iterable[Input] = (),
        outputs: Iterable[str] = (),
        options: Options | None = None,
        progress: TransferProgress | None = None,
    ) -> Run:
        """Upload the inputs and submit.

        Inputs are relative to the current folder, unless they are `LocalFile`s; outputs to the task's work directory.
        """
        wanted = [checked_path(str(output), directory=True) for output in outputs]
        document = _command_document(self, command, options or Options())
        files = gather(inputs)
        check_sent(command, files, wanted)
        sent = [
            {
                "path": file.path,
                "sha256": self.artifacts.put_file(file, *([progress] if progress else [])),
                "size_bytes": file.size_bytes,
                "executable": file.executable,
            }
            for file in files
        ]
        if sent:
            document["inputs"] = sent
        if wanted:
            document["outputs"] = wanted
        answer = self.api.send_json("POST", "/v1/tasks", document)
        on = str(answer.get("on", "anyone"))
        return Run(self, str(answer["ids"][0]), function=False, own=True, on=on)

    def run(
        self,
        command: Sequence[str],
        *,
        inputs: Iterable[Input] = (),
        outputs: Iterable[str] = (),
        into: str | os.PathLike[str] = ".",
        check: bool = False,
        workdir: str | os.PathLike[str] | None = None,
        ignore: Sequence[str] = (),
        **options: Unpack[TaskOptions],
    ) -> Completed:
        """Run a command, wait for its end and fetch its outputs into `into`.

        `workdir`: folder whose files, except those its ignore files and `ignore` match, become the work directory.
        A non-zero exit code is returned, or raised with `check`; a time-out, a cancellation or a failed start raises.
        """
        shipped = shipment(workdir, ignore, inputs)
        run = self.submit_command(
            command, inputs=shipped, outputs=outputs, options=Options.of(options)
        )
        result = run.wait()
        if result.status != "succeeded" and (check or result.reason != "exited"):
            raise failure(result)
        printed = list(run.printed())
        try:
            written = self.artifacts.fetch(result.outputs, Path(into)) if result.outputs else []
        except GpoolError as error:
            error.add_note(
                f"task {run.id} has ended; fetch its outputs with: gpool result {run.id}"
            )
            raise
        return Completed(
            id=run.id,
            exit_code=exit_code(result),
            status=result.status,
            stdout="".join(piece.text for piece in printed if piece.stream == "stdout"),
            stderr="".join(piece.text for piece in printed if piece.stream == "stderr"),
            outputs=tuple(written),
        )

    # ---- tasks by id

    def get(
        self, task: str, *, trust: bool = False, results: Literal["pickle"] | None = None
    ) -> Run:
        """A task submitted earlier or elsewhere.

        `trust`: the function is yours, so a pickled value from your own node may be loaded. `results="pickle"`: pickles
        of any node may be.
        """
        if results not in (None, "pickle"):
            raise Invalid(f'results={results!r} is not known; give "pickle" or leave it out')
        pickle_requested = results == "pickle"
        document = self.api.get_json(f"/v1/tasks/{quote(task, safe='')}")
        return Run(
            self,
            task,
            function=document["kind"] == "function",
            own=trust or pickle_requested,
            pickle_requested=pickle_requested,
        )

    def cancel(self, task: str) -> dict[str, Any]:
        """Cancel a task and return its document."""
        reply = self.api.send("DELETE", f"/v1/tasks/{quote(task, safe='')}")
        found: dict[str, Any] = reply.json() if reply.body else {}
        return found

    def preempt(self, task: str) -> dict[str, Any]:
        """Preempt a task (operators only): it returns to the queue. Return its document."""
        reply = self.api.send("POST", f"/v1/tasks/{quote(task, safe='')}/preempt")
        found: dict[str, Any] = reply.json()
        return found

    def cancel_batch(self, batch: str) -> None:
        """Cancel the unfinished tasks of a batch and close it."""
        self.api.send("DELETE", f"/v1/batches/{quote(batch, safe='')}")

    def batch(self, batch: str, *, counts: bool = False) -> dict[str, Any]:
        """`counts`: with the number of tasks by status, which the server counts one by one."""
        path = f"/v1/batches/{quote(batch, safe='')}{'?counts=true' if counts else ''}"
        found: dict[str, Any] = self.api.get_json(path)
        return found

    def ended(self, batch: str, timeout: float | None = None) -> Iterator[Result]:
        """Yield results of a batch as its tasks end; `TimeoutError` after `timeout` seconds."""
        return mapping.ended(self.api, batch, timeout)

    def explain(self, task: str) -> dict[str, Any]:
        found: dict[str, Any] = self.api.get_json(f"/v1/tasks/{quote(task, safe='')}/explain")
        return found

    def listing(
        self,
        what: str,
        *,
        limit: int | None = None,
        on_page: Callable[[dict[str, Any]], None] | None = None,
        **filters: str,
    ) -> list[dict[str, Any]]:
        """Documents of a listing (`tasks`, `nodes`, `resources`) from all pages, at most `limit`.

        `on_page` is called with each page, for members beside its items.
        """
        return list(itertools.islice(self._pages(what, limit, filters, on_page), limit))

    def _pages(
        self,
        what: str,
        limit: int | None,
        filters: Mapping[str, str],
        on_page: Callable[[dict[str, Any]], None] | None,
    ) -> Iterator[dict[str, Any]]:
        query = dict(filters)
        if limit is not None:
            query["limit"] = str(max(1, min(limit, 200)))
        while True:
            page = self.api.get_json(f"/v1/{what}?{urlencode(query)}")
            if on_page is not None:
                on_page(page)
            yield from page["items"]
            if not page.get("next"):
                return
            query["cursor"] = str(page["next"])


def submit_calls(
    client: Client,
    task: Task[..., Any],
    calls: Sequence[bytes],
    batch: str | None,
    *,
    more: bool,
    due: bytes = b"",
) -> SubmittedBatch:
    """Submit calls of `rendered_call` to a batch (None: a new one); without `more` it is closed."""
    place = {"more": more} if batch is None else {"more": more, "batch": batch}
    start, joined, due = _members(place), b",".join(calls), due or _deadline(task)
    reply = client._post(
        task, "/v1/tasks", lambda: b"%s,%s%s%s]}" % (start, due, client._head(task), joined)
    )
    return decode_submitted(reply.body)


def rendered_call(
    client: Client, task: Task[..., Any], args: Sequence[object], kwargs: Mapping[str, object]
) -> bytes:
    """Call as the request holds it; large arguments are uploaded. `Invalid` names one that cannot be sent."""
    return client._render(dumps_call(task.function, args, kwargs))


def quote_command(
    client: Client, command: Sequence[str], options: Options | None = None
) -> dict[str, Any]:
    """Expected cost and start of a command, without submitting it. Uploads nothing and sends no secret's value."""
    document = _command_document(client, command, options or Options())
    if options is not None and options.secrets:
        document["secrets"] = dict.fromkeys(options.secrets)
    found: dict[str, Any] = client.api.send_json("POST", "/v1/quotes", document)
    return found


def _command_document(
    client: Client, command: Sequence[str], options: Options
) -> dict[str, object]:
    if isinstance(command, str) or not command:
        raise Invalid("a command is a list of words, e.g. ['python', 'train.py']")
    if options.results is not None:
        raise Invalid(
            f"results is {options.results!r}, but a command has no pickled result; leave 'results' out: "
            "a command's outputs are fetched as files"
        )
    if options.verify == "check":
        raise Invalid(
            'verify is "check", but a command returns no value that a function could check; give verify=2 or 3, '
            "or run a function"
        )
    if callable(options.compare):
        raise Invalid(
            "compare is a function, but a command returns no value that a function could compare; its outputs are "
            "compared by hash: leave 'compare' out, or run a function"
        )
    document = client._requested(options)
    document["command"] = [str(word) for word in command]
    if script := _script_in(command):
        document.setdefault("name", script)
    return document


def _script_in(command: Sequence[str]) -> str | None:
    if len(command) < 2 or not _INTERPRETER.fullmatch(Path(command[0]).name):
        return None
    word = Path(str(command[1])).name
    return word if _SCRIPT.fullmatch(word) else None


def _deadline(task: Task[..., Any]) -> bytes:
    by = task.options.by
    return b"" if by is None else b'"by":"%s",' % times.due(by).encode()


def _members(members: Mapping[str, object]) -> bytes:
    return json_of(dict(members))[:-1]


_default: tuple[int, Client] | None = None


def default_client() -> Client:
    """Client of `gpool.task` and `gpool.run`: created at first use, and again in a forked process."""
    global _default
    if _default is None or _default[0] != os.getpid():
        _default = (os.getpid(), Client())
    return _default[1]


task: Decorator = Decorator(default_client)


def run(
    command: Sequence[str],
    *,
    inputs: Iterable[Input] = (),
    outputs: Iterable[str] = (),
    into: str | os.PathLike[str] = ".",
    check: bool = False,
    workdir: str | os.PathLike[str] | None = None,
    ignore: Sequence[str] = (),
    **options: Unpack[TaskOptions],
) -> Completed:
    """Run a command in the pool; see `Client.run`. Options: docs/options.md."""
    return default_client().run(
        command,
        inputs=inputs,
        outputs=outputs,
        into=into,
        check=check,
        workdir=workdir,
        ignore=ignore,
        **options,
    )


__all__ = ["Client", "Completed", "default_client", "run", "task"]
