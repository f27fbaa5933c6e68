"""What whoever waits for a task or for files on their way is told meanwhile. It asks the server why a task waits, and nothing else."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import click

from gpool.core.errors import GpoolError

if TYPE_CHECKING:
    from gpool.client.files.artifacts import TransferProgress
    from gpool.client.logs import TaskProgress
    from gpool.client.runs import Run

DOING = {
    "queued": "waiting for a node…",
    "fetch": "fetching the inputs…",
    "build": "building the environment…",
    "start": "starting the sandbox…",
    "collect": "collecting the outputs…",
}
"""What a task does, by its phase or its status; what is not here says nothing."""


def on_stderr(line: str) -> None:
    click.echo(line, err=True)


class ProgressLine:
    """Says, for a terminal (`phases`), what a task does before it runs, and when it has to wait again.

    Anywhere, once it has waited for a while: why. Else somebody whose task can never start would wait with it.
    """

    def __init__(
        self,
        say: Callable[[str], None] = on_stderr,
        run: Run | None = None,
        *,
        phases: bool = True,
    ) -> None:
        self._say, self._run, self._phases = say, run, phases
        self._seen: TaskProgress | None = None
        self._last = ""
        self._is_explained = False

    def __call__(self, progress: TaskProgress) -> None:
        from gpool.cli.output.printing import styled

        if progress == self._seen:  # nothing has happened since
            if progress.status == "queued":
                self._explain()
            return
        self._seen, self._is_explained = progress, False
        said = DOING.get(progress.phase or progress.status, "")
        if progress.status == "queued" and progress.epoch:
            said = "waiting for a node again…"
        if said and said != self._last and self._phases:
            self._say(styled(f"gpool: {said}", colour="cyan"))
        self._last = said

    def _explain(self) -> None:
        from gpool.cli.output.printing import plain

        if self._run is None or self._is_explained:
            return
        try:
            sentence = self._run.explain()
        except GpoolError:  # it can wait: the task is what was asked for
            return
        self._is_explained = True
        self._say(
            f"gpool: it waits. {plain(sentence)}\n"
            f"  When it starts, and what would start it now: gpool explain {self._run.id}"
        )


@contextmanager
def progress_bar() -> Iterator[TransferProgress | None]:
    """A bar for each file on its way, on a terminal only."""
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
        if not known:  # not before: where nothing is moved, the terminal is left alone
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
        told = f"{len(ended)} files"
        bars.update(
            known[""], description=told, completed=sum(ended.values()), visible=len(ended) > 1
        )

    try:
        yield show
    finally:
        bars.stop()
