"""One verified task at one tick: late siblings are replaced, a complete round is decided, its verdict is written."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from gpool.core.errors import Invalid
from gpool.core.ids import BatchId, NodeId, SpecId, TaskId, UserId
from gpool.core.model import INLINE_LIMIT_BYTES, Instant, TaskStatus
from gpool.core.scheduler.place.fit import is_open
from gpool.core.trust import rounds
from gpool.core.trust.checks import NUMBERS
from gpool.core.trust.comparison import Same
from gpool.core.trust.quorum import Disagreed, More, QuorumReached
from gpool.core.trust.rounds import RunState, SiblingRun
from gpool.core.trust.spot import (
    DEFAULT_SPOT,
    ReliabilityKey,
    check_rate,
    is_chosen,
    passed_checks,
)
from gpool.observability.logs import get_logger
from gpool.server.actions.tasks import deletion
from gpool.server.actions.tasks.outputs import location_of, remove_unless_recorded
from gpool.server.server import Server
from gpool.server.store.operations.tasks import artifacts, tasks
from gpool.server.store.operations.tasks.submissions import Submission, SubmittedTasks
from gpool.server.store.operations.verification import siblings as operations
from gpool.server.store.operations.verification import standings, verdicts
from gpool.server.store.operations.verification.siblings import (
    CheckInput,
    NewSibling,
    OpenVerification,
    SiblingRow,
)
from gpool.server.store.operations.verification.verdicts import ComparedAnswer, Verdict
from gpool.server.store.protocol import Operation, operation
from gpool.server.store.rows import REASON
from gpool.server.store.values import Recording
from gpool.server.verification.answers import SiblingAnswer, read_answers, same_answers
from gpool.server.verification.check_values import MAX_CHECKED_BYTES
from gpool.server.verification.draws import SiblingCandidates, candidates, draw_nodes
from gpool.server.verification.sibling_runs import run_of
from gpool.server.verification.spot import ready_for_spot, stakes

log = get_logger(__name__)


class Round:
    """One verified task at one tick."""

    def __init__(
        self,
        server: Server,
        parent: OpenVerification,
        rows: Sequence[SiblingRow],
        banned: frozenset[NodeId],
        now: Instant,
    ) -> None:
        self._server, self._parent, self._rows, self._now = server, parent, rows, now
        self._banned = banned
        self._runs = {row.task_id: run_of(row) for row in rows}
        self._comparers: list[ComparedAnswer] = []
        """Parts of siblings that ran the consumer's comparator."""

    async def advance(self) -> None:
        runs = list(self._runs.values())
        away = {run.node for run in runs if not self._takes_tasks(run.node)}
        late = rounds.late(runs, away, self._now)
        if late and self._candidates().owners(self._taken()):
            await self._replace(late)
            gone = {run.task for run in late}
            runs = [run for run in runs if run.task not in gone]
        if rounds.is_open(runs):
            return
        failed = [row for row in self._rows if _has_failed(row)]
        if len(failed) >= rounds.MOST_VOID:
            await self._give_up(failed)
            return
        await self._decide()

    async def _give_up(self, failed: Sequence[SiblingRow]) -> None:
        """End a task that no node could run, or whose comparator none could run."""
        spec = self._parent.spec
        if not spec.comparator_sha256 or any(row.number < NUMBERS for row in failed):
            await self._refuse([], f"no node could run it: {_reasons(failed)}")
            return
        rows = [r for r in self._rows if self._runs[r.task_id].state is RunState.ANSWERED]
        answers = await read_answers(self._server, spec, rows)
        text = f"its answers differ and no node could run its comparator: {_reasons(failed)}"
        await self._refuse(answers, text, "not_compared")

    def _takes_tasks(self, id_: NodeId) -> bool:
        entry = self._server.picture.state.nodes.get(id_)
        return entry is not None and entry.node is not None and is_open(entry.node)

    def _taken(self) -> set[UserId]:
        """Owners with an answer or an open sibling: none of them is drawn again."""
        return {
            row.owner_id for row in self._rows if self._runs[row.task_id].state is not RunState.VOID
        }

    def _candidates(self) -> SiblingCandidates:
        parent, state = self._parent, self._server.picture.state
        return candidates(state, parent.spec, parent.user_id, parent.team_id, self._banned)

    async def _replace(self, late: Sequence[SiblingRun]) -> None:
        ids = [run.task for run in late]
        recording = await self._server.write(_cancel(ids, self._now))
        self._server.picture.absorb(recording)
        for run in late:
            log.info("sibling replaced", task=run.task, node=run.node, state=run.state.value)

    async def _decide(self) -> None:
        spec, rows = self._parent.spec, self._answered()
        answers = await read_answers(self._server, spec, rows)
        is_spot = self._parent.siblings == rounds.SPOT
        is_checked = not is_spot or len(answers) > 1
        if is_spot and len(answers) == 1:
            is_checked = await self._is_drawn(rows[0], answers[0])
        same = await self._same(answers)
        if same is None:
            return  # the comparator runs, or has failed
        found = rounds.verdict(self._parent.siblings, len(answers), same, is_checked=is_checked)
        match found:
            case More(siblings):
                await self._start(siblings)
            case QuorumReached(accepted, winners, _):
                states = ["agreed" if n in winners else "differed" for n in range(len(answers))]
                own = answers[0].task if is_spot else None
                await self._accept(
                    answers, answers[accepted].task, states if is_checked else ["unchecked"], own
                )
            case Disagreed(count):
                text = f"its {count} siblings gave different answers and no value has the lead it needs"
                await self._refuse(answers, text)

    def _answered(self) -> list[SiblingRow]:
        """Siblings that ran the task and have answered."""
        return [
            row
            for row in self._rows
            if row.number < NUMBERS and self._runs[row.task_id].state is RunState.ANSWERED
        ]

    async def _same(self, answers: Sequence[SiblingAnswer]) -> Same | None:
        """Return how answers are compared; None: not in this tick."""
        return same_answers(self._parent.spec, answers)

    async def _start(
        self, count: int, first: int | None = None, check: CheckInput | None = None
    ) -> None:
        """Start siblings, or checks of the value in `check`, with the numbers from `first` on."""
        server, parent = self._server, self._parent
        if first is None:
            first = self._next_number()
        found = self._candidates()
        if parent.siblings == rounds.SPOT and not first:
            found = await ready_for_spot(server, found, parent.spec.environment, self._now)
        answered = [r for r in self._rows if self._runs[r.task_id].state is RunState.ANSWERED]
        drawn = draw_nodes(
            draw_secret(server),
            parent.task_id,
            range(first, first + count),
            found,
            self._taken(),
            answered[0].node_id if answered else None,
        )
        if len(drawn) < count:
            return  # too few owners just now: `explain` says so
        ids = server.ids
        new = [
            NewSibling(
                TaskId(ids.next()),
                BatchId(ids.next()),
                SpecId(ids.next()),
                number,
                one.node,
                one.owner,
            )
            for number, one in enumerate(drawn, first)
        ]
        void = [row.task_id for row in self._rows if self._is_void(row)]
        starting = _start(void, parent, new, server.picture.term, self._now, check)
        for submission, submitted in await server.write(starting):
            server.picture.add_submission(submitted, submission)
            server.picture.changed.call()

    def _next_number(self) -> int:
        """Return the number of the next sibling that runs the task."""
        return 1 + max((row.number for row in self._rows if row.number < NUMBERS), default=-1)

    async def _start_with(self, call: bytes, count: int, first: int) -> None:
        """Start checks or comparisons with a pickled call, which is stored if it is large."""
        if len(call) <= INLINE_LIMIT_BYTES:
            await self._start(count, first, CheckInput(call))
            return
        stored = await self._server.blobs.put_bytes(call)
        recorded = artifacts.StoredBytes(stored.object, stored.file_key)
        try:
            await self._start(count, first, CheckInput(b"", stored.sha256, len(call), recorded))
        finally:
            await remove_unless_recorded(self._server, stored)

    async def _content(self, what: str, sha256: str) -> bytes:
        size = await self._server.store.read(artifacts.size_of(sha256))
        if size is None or size > MAX_CHECKED_BYTES:
            raise Invalid(f"the {what} has more than {MAX_CHECKED_BYTES} bytes")
        where = await location_of(self._server, sha256)
        return await self._server.blobs.read_range(where, 0, size)

    def _is_void(self, row: SiblingRow) -> bool:
        return self._runs[row.task_id].state is RunState.VOID

    async def _is_drawn(self, row: SiblingRow, answer: SiblingAnswer) -> bool:
        """Return whether the only answer of a spot-checked task is checked. Its node has answered before the draw."""
        server, node = self._server, row.node_id
        record = (await server.store.read(standings.node_records([node])))[node]
        environment = self._parent.spec.environment
        model = next((o.model for o in self._candidates().capable if o.node == node), "")
        passed = passed_checks(record.passed, ReliabilityKey(node, model, environment))
        price, stake = await stakes(server, row.task_id, node)
        rate = check_rate(DEFAULT_SPOT, record.standing, passed, price, stake)
        epoch = row.epoch or 0
        return is_chosen(draw_secret(server), row.task_id, epoch, answer.digest, rate)

    async def _accept(
        self,
        answers: Sequence[SiblingAnswer],
        accepted: TaskId,
        states: Sequence[str],
        own: TaskId | None,
    ) -> None:
        compared = [compared_answer(one, state) for one, state in zip(answers, states, strict=True)]
        compared += self._comparers
        parent = self._parent
        found = {
            one.node: (one.model, parent.spec.environment) for one in self._candidates().capable
        }
        await self._write(Verdict(parent.task_id, compared, accepted, keys=found, own=own))

    async def _refuse(
        self, answers: Sequence[SiblingAnswer], text: str, outcome: str = "no_quorum"
    ) -> None:
        compared = [compared_answer(one, "void") for one in answers]
        compared += [replace(one, state="void") for one in self._comparers]
        await self._write(Verdict(self._parent.task_id, compared, text=text, refusal=outcome))

    async def _write(self, verdict: Verdict) -> None:
        server = self._server
        written = await server.write(verdicts.decide(verdict, server.picture.term, self._now))
        server.picture.absorb(written.recording)
        await deletion.remove_files(server, written.artifacts)
        for one in verdict.compared:
            if one.state == "differed":
                log.warning(
                    "an answer differed from the accepted one", task=one.task, node=one.node
                )


def draw_secret(server: Server) -> bytes:
    """Secret under which nodes are drawn: of the pool, equal on every replica."""
    return bytes.fromhex(server.sealer.mark(b"gpool.verification"))


def _has_failed(row: SiblingRow) -> bool:
    """Return whether the sibling ended by itself without an answer; replaced ones are not counted."""
    if row.reason is None or row.status == TaskStatus.CANCELLED:
        return False
    return REASON[row.reason] in rounds.NO_ANSWERS


def _reasons(rows: Sequence[SiblingRow]) -> str:
    return ", ".join(sorted({(row.reason or "").replace("_", " ") for row in rows}))


def compared_answer(answer: SiblingAnswer, state: str) -> ComparedAnswer:
    return ComparedAnswer(answer.task, answer.node, state, answer.digest.hex(), answer.summary)


@operation
def _cancel(ids: Sequence[TaskId], at: Instant) -> Operation[Recording]:
    yield from operations.void_siblings(ids)
    return (yield from tasks.cancel(ids, None, at))


@operation
def _start(
    void: Sequence[TaskId],
    parent: OpenVerification,
    new: Sequence[NewSibling],
    term: int,
    at: Instant,
    check: CheckInput | None,
) -> Operation[list[tuple[Submission, SubmittedTasks]]]:
    """Void siblings lose their claim on their owners in the transaction that draws anew."""
    if void:
        yield from operations.void_siblings(void)
    return (yield from operations.start_siblings(parent, new, term, at, check))
