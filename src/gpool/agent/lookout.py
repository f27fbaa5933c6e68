"""Looks at the machine and at the owner's rules, and says what that means as events for the session."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

import structlog

from gpool.agent.instructions import Event, OfferDetected, ReclaimAsked, RunsLimited
from gpool.agent.policy import AtClose, Facts, Policy, Standing, decide, parse, shaped
from gpool.agent.sandboxes import Allowed
from gpool.core.errors import Invalid
from gpool.core.model import Offer

log = structlog.get_logger(__name__)


class Rulebook:
    """The owner's file. Read again when it changed; a mistake in it leaves the rules as they were.

    Lanes are opened by the lists that were there at the start: others withdraw egress until the agent is started again.
    """

    def __init__(self, path: Path | None) -> None:
        """`Invalid` for a file that cannot be read or understood: an owner who wrote rules means them."""
        self._path = path
        self._seen = self._stamp()
        self.policy = Policy() if path is None else parse(_text(path))
        self._lists = replace(self.policy.egress, offered=True)

    def refresh(self) -> bool:
        """Whether there are new rules."""
        stamp = self._stamp()
        if self._path is None or stamp == self._seen:
            return False
        self._seen = stamp
        try:
            policy = parse(_text(self._path))
        except Invalid as error:
            log.warning("policy_not_changed", file=str(self._path), error=error.detail)
            return False
        if replace(policy.egress, offered=True) != self._lists:
            log.warning("egress_withdrawn", why="its lists changed: start the agent again")
            policy = replace(policy, egress=replace(policy.egress, offered=False))
        changed, self.policy = policy != self.policy, policy
        return changed

    def allowed(self) -> Allowed:
        """What may be given just now; for leases that were granted by older rules."""
        return Allowed(self.policy.tiers, self.policy.egress.offered)

    def has_changed(self) -> bool:
        """Whether `refresh` has something to read."""
        return self._path is not None and self._stamp() != self._seen

    def _stamp(self) -> tuple[int, int, int] | None:
        try:
            facts = self._path.stat() if self._path is not None else None
        except OSError:
            return None
        return None if facts is None else (facts.st_mtime_ns, facts.st_size, facts.st_ino)


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise Invalid(f"the policy in {path} cannot be read: {error}") from error


@dataclass(slots=True)
class Lookout:
    """`offer` is what the machine has, `facts` how it is; both may take their time."""

    rules: Rulebook
    offer: Callable[[], Offer]
    facts: Callable[[], Facts]
    standing: Standing = field(default_factory=Standing)
    kept: frozenset[int] | None = None  # GPUs, at the look before
    longest_us: int | None = None

    def first_offer(self) -> Offer:
        """What is offered before the first look has been told."""
        decision, _ = decide(self.rules.policy, self.facts(), self.standing)
        return shaped(self.rules.policy, self.offer(), decision)

    def look(self) -> tuple[Event, ...]:
        self.rules.refresh()
        policy = self.rules.policy
        decision, self.standing = decide(policy, self.facts(), self.standing)
        events: list[Event] = []
        longest = policy.longest_run
        longest_us = None if longest is None else int(longest.total_seconds() * 1_000_000)
        if longest_us != self.longest_us:
            self.longest_us = longest_us
            events.append(RunsLimited(longest_us))
        events.append(OfferDetected(shaped(policy, self.offer(), decision)))
        wanted = frozenset() if self.kept is None else policy.kept.gpus - self.kept
        self.kept = policy.kept.gpus
        if decision.reclaims:
            events.append(ReclaimAsked(None, f"its owner took the machine back: {decision.closed}"))
        elif wanted and policy.at_close is AtClose.RECLAIM:
            events.append(ReclaimAsked(wanted, "its owner took the GPU back"))
        return tuple(events)
