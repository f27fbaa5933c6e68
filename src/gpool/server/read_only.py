"""Read-only mode of the pool: requests and loops that change something wait until it ends; nodes keep their leases.

Sign-ins, revocations, nodes' connections, heartbeats and uploads of outputs are still written, so that nobody is
locked out and no running task is lost. Reports of nodes are not recorded: their agents keep them, and send them again
on the connection that follows the end of the mode.
"""

from __future__ import annotations

from collections.abc import Iterable

from gpool.core.errors import ReadOnly
from gpool.core.permissions import RULES, Action

RETRY_AFTER_S = 30
STILL_WRITTEN = frozenset(
    {
        Action.SIGN_IN_PROVE,
        Action.SIGN_IN,
        Action.REFRESH,
        Action.SIGN_OUT,
        Action.SESSION_END,
        Action.KEY_END,
        Action.USER_SUSPEND,
        Action.READ_ONLY_SET,
    }
)
BY_NODES = frozenset(
    {Action.NODE_PROVE, Action.NODE_CHANNEL, Action.NODE_REPORT, Action.ARTIFACT_UPLOAD_OUTPUT}
)
LOOPS = frozenset({"follow", "monitor", "lag", "anchors"})
"""Loops that go on: they read, or write about this process only."""


class ReadOnlyMode:
    """`reason`: given by the operator; empty: the pool can be changed."""

    def __init__(self) -> None:
        self.reason = ""

    @property
    def is_on(self) -> bool:
        return bool(self.reason)

    def set(self, reason: str) -> bool:
        """Set the mode; whether it has just ended."""
        has_ended = self.is_on and not reason
        self.reason = reason
        return has_ended

    def check(self, actions: Iterable[Action], *, by_node: bool) -> None:
        """Raise `ReadOnly` if a request for one of the actions may change the pool now."""
        if not self.is_on:
            return
        allowed = STILL_WRITTEN | BY_NODES if by_node else STILL_WRITTEN | {Action.NODE_PROVE}
        changing = [each for each in actions if RULES[each].changes]
        if changing and not any(each in allowed for each in changing):
            raise ReadOnly(
                f"the pool is read-only: {self.reason}; nothing was changed, try again later",
                retry_after=RETRY_AFTER_S,
            )
