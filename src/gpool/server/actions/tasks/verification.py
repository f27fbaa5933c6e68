"""Progress of a verified task for its consumer: numbers of siblings, and why it waits. Shows no answer and no node."""

from __future__ import annotations

from collections import Counter

from gpool.core.ids import TaskId, UserId, encode
from gpool.core.model import TaskStatus
from gpool.core.scheduler.explain.mismatch import Explanation, counted
from gpool.core.trust import rounds
from gpool.core.trust.checks import NUMBERS
from gpool.core.trust.quorum import comparers_of
from gpool.core.trust.rounds import RunState
from gpool.server.server import Server
from gpool.server.store.operations.verification import siblings as operations
from gpool.server.store.operations.verification import standings, verdicts
from gpool.server.store.operations.verification.siblings import SiblingRow
from gpool.server.store.values import TaskView
from gpool.server.verification.draws import candidates
from gpool.server.verification.sibling_runs import run_of
from gpool.server.verification.spot import ready_for_spot
from gpool.wire.documents import VerificationDocument


async def summary(server: Server, view: TaskView) -> VerificationDocument | None:
    """Return numbers of siblings; None for a task that is not verified."""
    needed = view.spec.requirements.siblings
    if not needed:
        return None
    rows = await _siblings(server, view.row.id)
    by_run = Counter(run_of(row).state for row in rows)
    by_state = Counter(row.state for row in rows)
    is_over = view.row.status.is_final
    state = await server.store.read(verdicts.state_of(view.row.id))
    outcome, rerun = "open", None
    if view.row.status is TaskStatus.CANCELLED:
        outcome = "cancelled"
    elif is_over:
        outcome = "accepted" if state is None else state.outcome
        rerun = None if state is None else state.rerun_id
    return VerificationDocument(
        needed=needed,
        tolerance=view.spec.tolerance,
        waiting=0 if is_over else by_run[RunState.WAITING],
        running=0 if is_over else by_run[RunState.RUNNING],
        answered=0 if is_over else by_run[RunState.ANSWERED],
        agreed=by_state["agreed"] + by_state["unchecked"],
        differed=by_state["differed"],
        no_answer=by_state["void"] if is_over else by_run[RunState.VOID],
        outcome=outcome,
        rerun=None if rerun is None else encode("task", rerun),
        cost_microcredits=None if state is None else state.cost,
    )


async def explanation(server: Server, view: TaskView) -> Explanation:
    """Say what a verified task that has not ended waits for."""
    needed, row = view.spec.requirements.siblings, view.row
    is_spot = needed == rounds.SPOT
    rows = await _siblings(server, row.id)
    runs = [run_of(each) for each in rows]
    states = Counter(run.state for run in runs)
    if states[RunState.RUNNING] or states[RunState.WAITING]:
        parts = [
            f"{states[state]} {state.value}"
            for state in (RunState.RUNNING, RunState.WAITING, RunState.ANSWERED)
            if states[state]
        ]
        said = (
            f"Nodes of different owners run it, {needed} of which must agree: {', '.join(parts)}."
        )
        if view.spec.check_sha256:
            said = f"Nodes of different owners run it and check its result: {', '.join(parts)}."
        elif any(each.number >= NUMBERS for each in rows):
            said = f"Nodes of different owners run it or compare its answers: {', '.join(parts)}."
        return Explanation("verifying", said)
    banned = await server.store.read(standings.banned_nodes(server.now))
    found = candidates(server.picture.state, view.spec, row.user, row.team, banned)
    answered = {
        each.owner_id
        for each, run in zip(rows, runs, strict=True)
        if run.state is RunState.ANSWERED
    }
    owners: set[UserId] = found.owners(answered)
    if answered and view.spec.check_sha256:
        if owners:
            said = "Nodes of further owners are drawn that run it or check its result."
            return Explanation("verifying", said)
        had = counted(len(answered), "owner has", "owners have")
        said = f"{had} run it or checked its result; it needs a node of a further owner, and continues when one joins."
        return Explanation("too_few_owners", said)
    if len(owners) + len(answered) < needed:
        there = counted(len(owners) + len(answered), "such owner has", "such owners have")
        said = f"It needs nodes of {needed} owners other than you that can run it; {there} one. It starts when more join."
        return Explanation("too_few_owners", said)
    if is_spot and not answered:
        ready = await ready_for_spot(server, found, view.spec.environment, server.now)
        if not ready.capable:
            said = (
                f"{counted(len(found.capable), 'node', 'nodes')} could run it, but a new node gets a spot-checked task "
                "once in 6 hours until 8 of its results were checked; verify=2 does not wait for that."
            )
            return Explanation("probation", said)
    if answered and is_spot:
        said = "Its answer was drawn for a check, which runs on a node of another owner where no other task waits."
        return Explanation("verifying", said)
    if answered and view.spec.comparator_sha256:
        said = (
            f"{counted(len(answered), 'owner has', 'owners have')} run it or compared its answers, which differ; nodes of at "
            f"least {comparers_of(needed).needed} further owners are drawn, as soon as so many can run it."
        )
        code = "verifying" if len(owners) >= comparers_of(needed).needed else "too_few_owners"
        return Explanation(code, said)
    if answered:
        said = f"Its {len(answered)} answers differ; nodes of further owners are drawn, as soon as enough can run it."
        return Explanation("verifying", said)
    return Explanation("verifying", "Nodes are drawn for it with the next tick of the server.")


async def _siblings(server: Server, parent: TaskId) -> list[SiblingRow]:
    found = await server.store.read(operations.siblings_of([parent]))
    return found.get(parent, [])
