"""Display of a followed task: output, phases, end; progress bars of transfers."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeVar

import click

from gpool.core.errors import GpoolError

if TYPE_CHECKING:
    from gpool.client.files.artifacts import TransferProgress
    from gpool.client.logs import Printed, TaskProgress
    from gpool.client.results import Result
    from gpool.client.runs import Run

T = TypeVar("T")

DOING = {
    "queued": "waiting for a node…",
    "fetch": "fetching the inputs…",
    "build": "building the environment…",
    "start": "starting the sandbox…",
    "collect": "collecting the outputs…",
}
"""Message for a phase or status; other phases and statuses have none."""


def on_stderr(line: str) -> None:
    click.echo(line, err=True)


class ProgressLine:
    """Prints phases on a terminal (`phases`), and the reason for a long wait anywhere: the task may never start."""

    def __init__(
        self,
        print_line: Callable[[str], None] = on_stderr,
        run: Run | None = None,
        *,
        phases: bool = True,
    ) -> None:
        self._print, self._run, self._phases = print_line, run, phases
        self._seen: TaskProgress | None = None
        self._last = ""
        self._is_explained = False

    def __call__(self, progress: TaskProgress) -> None:
        from gpool.cli.output.printing import styled

        if progress == self._seen:  # unchanged
            if progress.status == "queued":
                self._explain()
            return
        self._seen, self._is_explained = progress, False
        message = DOING.get(progress.phase or progress.status, "")
        if progress.status == "queued" and progress.epoch:
            message = "waiting for a node again…"
        if message and message != self._last and self._phases:
            self._print(styled(f"gpool: {message}", colour="cyan"))
        self._last = message

    def _explain(self) -> None:
        from gpool.cli.output.printing import plain

        if self._run is None or self._is_explained:
            return
        try:
            sentence = self._run.explain()
        except GpoolError:  # not essential; the task is still followed
            return
        self._is_explained = True
        self._print(
            f"gpool: waiting. {plain(sentence)}\n"
            f"  For the expected start and alternatives: gpool explain {self._run.id}"
        )


def show(pieces: Iterator[Printed | str], *, quiet: bool) -> None:
    """Messages (`str`) go to standard error."""
    from gpool.cli.output.printing import LogPrinter

    LogPrinter(all_to_stderr=quiet).show(_without_messages(pieces))


def show_documents(pieces: Iterator[dict[str, Any] | str]) -> None:
    """Print one JSON list as documents arrive, closed even after Ctrl-C."""
    from gpool.cli.output.printing import emit_json_list

    emit_json_list(_without_messages(pieces))


def _without_messages(pieces: Iterator[T | str]) -> Iterator[T]:
    for one in pieces:
        if isinstance(one, str):
            on_stderr(one)
        else:
            yield one


def print_outcome(result: Result, *, code_too: bool = False) -> None:
    from gpool.cli.output.printing import plain
    from gpool.client.results import failure

    if result.status != "succeeded" and (code_too or result.reason != "exited"):
        click.echo(f"gpool: {plain(failure(result).detail)}", err=True)


@contextmanager
def progress_bar() -> Iterator[TransferProgress | None]:
    if not sys.stderr.isatty():
        yield None
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TaskID, TextColumn

    bars = Progress(
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        DownloadColumn(),
        console=Console(stderr=True),
        transient=True,
    )
    known: dict[str, TaskID] = {}
    ended: dict[str, int] = {}

    def show(path: str, done: int, total: int) -> None:
        if not known:  # no bars if nothing is transferred
            bars.start()
            known[""] = bars.add_task("", total=None, visible=False)
        if done < total and path not in known:
            known[path] = bars.add_task(path, total=total)
        if done < total:
            bars.update(known[path], completed=done)
            return
        ended[path] = total
        if path in known:
            bars.remove_task(known.pop(path))
        summary = f"{len(ended)} files"
        bars.update(
            known[""], description=summary, completed=sum(ended.values()), visible=len(ended) > 1
        )

    try:
        yield show
    finally:
        bars.stop()
