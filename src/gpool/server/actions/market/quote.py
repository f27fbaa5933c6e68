"""Quote: expected cost and start of a submission that is not made. Plans on a copy; changes nothing."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, replace

from gpool.core.ids import decode
from gpool.core.model import SECOND, Node, Shape, Span, TaskSpec
from gpool.core.money.charging import FrozenPrice, set_aside, total_charge
from gpool.core.money.offers import OfferFilter
from gpool.core.money.prices import is_free_for
from gpool.core.money.transfers import TransferOutcome, parse_credits
from gpool.core.permissions import Action, TeamId
from gpool.core.scheduler.explain.mismatch import counted, nothing_can
from gpool.core.scheduler.explain.whatif import StartNow
from gpool.core.scheduler.order.limits import Holder
from gpool.core.scheduler.place.fit import is_open, possible_prices, unfit
from gpool.core.scheduler.place.gangs import most_together
from gpool.core.scheduler.state.waiting import shape_of
from gpool.core.specs.owners import ANYONE
from gpool.core.trust.quorum import comparers_of
from gpool.server.actions.market.offers import NODES_AT_ONCE, grouped, offer_document
from gpool.server.actions.owners import accepted_owners
from gpool.server.actions.tasks.explain import no_funds
from gpool.server.actions.tasks.query import acting_account
from gpool.server.actions.tasks.specs import spec_of
from gpool.server.identity.authorization import permit
from gpool.server.scheduling.learning import Estimate
from gpool.server.server import Server
from gpool.server.store.identity_values import Caller
from gpool.server.store.operations.money import limits
from gpool.server.store.operations.money.funding import payer_of
from gpool.server.store.values import UnfundedPlace
from gpool.wire.documents import EstimateDocument, TaskRequest, instant_to_datetime
from gpool.wire.market import CostRange, QuoteDocument, RunRange

MOST_OFFERS = 10
LOW, MIDDLE, HIGH = 0.1, 0.5, 0.9
"""Quantiles of the run times of ended tasks."""


@dataclass(frozen=True, slots=True)
class _Matches:
    """Nodes that could run it: lowest and highest price of one node per hour, and the highest minimum charge."""

    nodes: int
    lowest: int
    highest: int
    min_charge: int


@dataclass(frozen=True, slots=True)
class _ExpectedRun:
    spans: tuple[Span, Span, Span]  # low, expected, high
    is_own: bool


async def quote(server: Server, who: Caller, request: TaskRequest) -> QuoteDocument:
    """Raises what a submission of the request raises for its form, team and owners."""
    team = None if request.team is None else TeamId(decode("team", request.team))
    permit(
        who,
        Action.TASK_QUOTE,
        await acting_account(server, who, team),
        f"team {request.team}",
    )
    spec = spec_of(request)
    if request.on is not None or spec.secrets or server.settings.default_on != ANYONE:
        on = await accepted_owners(server, who, request.on, has_secrets=bool(spec.secrets))
        spec = replace(spec, requirements=replace(spec.requirements, on=on))
    runs = max(1, spec.requirements.siblings)  # a verified task is run several times
    if spec.comparator_sha256 and runs > 1:
        runs += comparers_of(runs).needed  # a comparison counts as a run: its time is not known
    spec = replace(spec, requirements=replace(spec.requirements, siblings=0))
    shape = shape_of(spec, who.user.id, team)
    tasks = request.copies if request.calls is None else max(1, len(request.calls))
    cap = None if request.max_cost is None else parse_credits(str(request.max_cost))
    with server.explaining.admitted():
        found = await _quote(server, shape, spec, tasks * runs)
    found = found.model_copy(update={"tasks": tasks})
    if not server.settings.prices or not found.rate_microcredits:
        return found
    price = FrozenPrice(found.rate_microcredits, found.min_charge_microcredits)
    missing = await _missing_funds(server, payer_of(shape.user, shape.team), price, cap)
    return (
        found.model_copy(update={"sentence": f"{found.sentence} {missing}"}) if missing else found
    )


async def _missing_funds(server: Server, payer: Holder, price: FrozenPrice, cap: int | None) -> str:
    """Sentence about funds or budget that do not allow the start of one task; empty: they do."""
    needed = set_aside(price, Span(0))
    needed = needed if cap is None else min(needed, cap)
    found = (await server.store.read(limits.funds((payer,), server.now))).get(payer)
    if found is not None and found.allows(needed):
        return ""
    has_balance = found is not None and found.balance >= needed
    outcome = TransferOutcome.OVER_BUDGET if has_balance else TransferOutcome.NO_FUNDS
    return no_funds(UnfundedPlace((), payer, outcome, needed), found, server.now).sentence


async def _quote(server: Server, shape: Shape, spec: TaskSpec, tasks: int) -> QuoteDocument:
    picture, now, gang = server.picture, server.now, shape.requirements.nodes
    nodes = [entry.node for entry in picture.state.nodes.values() if entry.node is not None]
    matches = await _matches(nodes, shape)
    if matches is None:
        why = _why_none(nodes, shape)
        return QuoteDocument(tasks=tasks, code="nothing_matches", sentence=why, rates=[], offers=[])
    start = await server.explaining.start_of(picture, shape, now)
    if start is None:
        estimate = await picture.forecasts.estimate_new(picture, now, shape)
        price = FrozenPrice(gang * matches.lowest, gang * matches.min_charge)
    else:
        estimate = Estimate(now, now, now)
        price = FrozenPrice(sum(start.prices), _minimum(nodes, start))
    run = _run_time(server, shape, spec)
    costs = [] if run is None else [tasks * total_charge(price, each) for each in run.spans]
    table = await grouped(server, [shape] if shape.requirements.gpu else [], OfferFilter())
    return QuoteDocument(
        tasks=tasks,
        code="waits" if start is None else "starts",
        sentence=_sentence(matches, start),
        rate_microcredits=price.rate_microcredits,
        rates=sorted({gang * matches.lowest, gang * matches.highest}),
        min_charge_microcredits=price.minimum_microcredits,
        known_from=None if run is None else "own" if run.is_own else "others",
        run_s=None if run is None else _seconds(run),
        cost=None if run is None else CostRange(low=costs[0], expected=costs[1], high=costs[2]),
        cost_at_timeout_microcredits=tasks * total_charge(price, spec.timeout),
        starts=None if estimate is None else _estimate(estimate),
        offers=[offer_document(*each) for each in table.page(None, MOST_OFFERS)],
    )


async def _matches(nodes: Sequence[Node], shape: Shape) -> _Matches | None:
    """None: too few nodes are open to it."""
    able: list[Node] = []
    prices: list[int] = []
    for place, node in enumerate(nodes):
        if is_open(node) and unfit(node, shape) is None:
            able.append(node)
            cap = shape.requirements.max_price_microcredits
            found = possible_prices(node, shape)
            prices += [each for each in found if cap is None or each <= cap]
        if place % NODES_AT_ONCE == NODES_AT_ONCE - 1:
            await asyncio.sleep(0)
    wanted = shape.requirements.nodes
    if not prices or (wanted > 1 and most_together(able) < wanted):
        return None
    highest = max(_minimum_of(node, shape) for node in able)
    return _Matches(len(able), min(prices), max(prices), highest)


def _minimum_of(node: Node, shape: Shape) -> int:
    is_free = is_free_for(node, shape.user, shape.team)
    return 0 if is_free else node.offer.min_charge_microcredits


def _minimum(nodes: Sequence[Node], start: StartNow) -> int:
    known = {node.id: node for node in nodes}
    place = start.place
    chosen = [place.node, *(member.node for member in place.members)]
    return sum(_minimum_of(known[id_], place.shape) for id_ in chosen if id_ in known)


def _run_time(server: Server, shape: Shape, spec: TaskSpec) -> _ExpectedRun | None:
    times = server.picture.forecasts.times
    if times.is_empty:
        return None
    low, middle, high = (
        Span(min(spec.timeout, times.left(shape, Span(0), each))) for each in (LOW, MIDDLE, HIGH)
    )
    return _ExpectedRun((low, middle, high), times.is_known(shape))


def _why_none(nodes: Sequence[Node], shape: Shape) -> str:
    able = [node for node in nodes if unfit(node, shape) is None]
    if not nodes:
        return "The pool has no nodes."
    if not able:
        return nothing_can(list(nodes), shape).sentence
    wanted = shape.requirements.nodes
    said = f"{counted(len(able), 'node', 'nodes')} could run it"
    if wanted > 1:
        return f"{said}, but fewer than {wanted} of one site take tasks now."
    return f"{said}, but none takes tasks now."


def _sentence(matches: _Matches, start: StartNow | None) -> str:
    found = counted(matches.nodes, "node matches", "nodes match")
    return f"{found}; none has room now." if start is None else f"{found}; it would start now."


def _seconds(run: _ExpectedRun) -> RunRange:
    low, middle, high = (round(each / SECOND, 3) for each in run.spans)
    return RunRange(low=low, expected=middle, high=high)


def _estimate(found: Estimate) -> EstimateDocument:
    return EstimateDocument(
        at=instant_to_datetime(found.at),
        earliest=instant_to_datetime(found.first),
        latest=instant_to_datetime(found.last),
    )
