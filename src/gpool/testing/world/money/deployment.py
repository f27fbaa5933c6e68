"""A server that charges: some nodes have a price, payers have more or less money, some tasks a `max_cost`.

The server's time of day is set forward by minutes, so that reservations of five minutes are used up within a run.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from gpool.core.model import Instant, Offer
from gpool.core.money.transfers import AccountKind, Grant, LedgerAccountId, TransferId
from gpool.core.scheduler.order.limits import Holder
from gpool.server.store.operations.money.accounts import NewAccount, open_accounts
from gpool.server.store.operations.money.transfers import record_transfers
from gpool.server.store.protocol import Operation, operation
from gpool.testing.simulation import Dice, VirtualLoop, new_loop
from gpool.testing.world.host import Host, HostEnvironment, Parts, ServerHost
from gpool.testing.world.liars import LiarPlan
from gpool.testing.world.money.flaws import FLAWED_PARTS, ChargingFlaw
from gpool.testing.world.money.oracle import MoneyOracle
from gpool.testing.world.world import WorldOutcome, run
from gpool.wire.documents import TaskRequest

S = 1_000_000
PER_HOUR = 360_000_000
"""Micro-credits: 100,000 a second, 30 credits set aside for five minutes."""

SET_ASIDE = PER_HOUR // 12
ENOUGH = 10**12
PAYERS: tuple[Holder, ...] = (("user", 10), ("user", 11), ("user", 12))
FIRST_ACCOUNT = 900_000


@dataclass(slots=True)
class PricedServer:
    """`Deployment` of the only server, with `prices` on. Everybody has enough money when the faults end."""

    settings: Mapping[str, Any] = field(default_factory=lambda: {"prices": True, "fee_ppm": 50_000})
    tolerated: tuple[type[BaseException], ...] = ()
    ends_us: int = 0
    endless: int = 0
    _dice: Dice | None = None
    _site: HostEnvironment | None = None

    def loop(self) -> VirtualLoop:
        return new_loop()

    def plan(self, dice: Dice, until_us: int) -> None:  # noqa: ARG002 - as a `Deployment`
        self._dice = dice.branch("money")

    def host(self, site: HostEnvironment) -> ServerHost:
        oracle = MoneyOracle(site.folder / "gpool.db", site.fail)

        def committed() -> None:
            site.committed()
            oracle.look()

        self._site = site
        dice = self._drawn
        for number, payer in enumerate(PAYERS):
            amount = dice.pick((0, SET_ASIDE - 1, 2 * SET_ASIDE, ENOUGH)) if number else ENOUGH
            if amount:
                site.file.write_now(_given(payer, number, amount, "first", site.clock.now()))
        return Host(replace(site, committed=committed))

    @property
    def _drawn(self) -> Dice:
        assert self._dice is not None, "`plan` comes first"
        return self._dice

    def begin(self, loop: VirtualLoop) -> None: ...

    def end_all(self) -> None:
        assert self._site is not None
        for number, payer in enumerate(PAYERS):
            now = self._site.clock.now()
            self._site.file.write_now(_given(payer, number, ENOUGH, "last", now))

    def offer(self, number: int, offer: Offer) -> Offer:
        price = PER_HOUR if number > 2 else self._drawn.pick((0, PER_HOUR, PER_HOUR, 3))
        minimum = self._drawn.pick((0, 0, 5_000)) if price else 0
        return replace(offer, price_microcredits=price, min_charge_microcredits=minimum)

    def request(self, request: TaskRequest) -> TaskRequest:
        cap = self._drawn.pick((None, None, "0.01", "0.15", "20", "1000"))
        return request if cap is None else request.model_copy(update={"max_cost": cap})


@operation
def _given(payer: Holder, number: int, amount: int, when: str, at: Instant) -> Operation[None]:
    new = NewAccount(payer, AccountKind.USER, LedgerAccountId(FIRST_ACCOUNT + number))
    accounts = yield from open_accounts([new])
    id_ = TransferId(f"grant:{when}:{number}")
    yield from record_transfers([Grant(id_, accounts[payer, AccountKind.USER], amount)], at)


def run_priced(
    seed: int, flaw: ChargingFlaw | None = None, *, liars: int = 0, keep_trace: bool = False
) -> WorldOutcome:
    """Run a seed in a pool that charges, perhaps with a planted bug and malicious nodes."""
    dice = Dice(f"steps-{seed}")
    is_stepped = dice.chance(0.5) and not liars  # leases that a liar keeps would last longer
    steps = ((dice.between(4, 12) * S, dice.between(0, 280) * S),) if is_stepped else ()
    parts = Parts() if flaw is None else replace(Parts(), **FLAWED_PARTS[flaw]())
    plan = LiarPlan(liars) if liars else None
    deployment = PricedServer()
    return run(seed, parts, keep_trace=keep_trace, steps=steps, liars=plan, deployment=deployment)
