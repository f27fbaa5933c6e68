"""ASGI middleware that refuses requests while the server is overloaded, with 429 and `Retry-After`, before anything else
is done for them. The decision is `overload.admission`'s; the agents' channel does not pass here.
"""

from __future__ import annotations

from time import monotonic

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from gpool.core.errors import Overloaded
from gpool.server.api.callers import RATE, RateClasses
from gpool.server.api.problems import problem
from gpool.server.api.request_metrics import waits
from gpool.server.identity.throttle import RouteClass
from gpool.server.metrics.registry import RequestSignals
from gpool.server.overload.admission import AdmissionController, LoadClass, Shed
from gpool.transfer.node_proofs import PROOF_HEADER
from gpool.transfer.requests import LEASE_HEADER

_OF_NODES = (PROOF_HEADER.lower().encode(), LEASE_HEADER.lower().encode())
_SUBJECTS = {
    LoadClass.LISTING: "listings are",
    LoadClass.EXPLAIN: "listings and explanations are",
    LoadClass.SUBMISSION: "listings, explanations and some submissions are",
    LoadClass.OTHER: "requests of users are",
}


class LoadShedder:
    def __init__(
        self,
        app: ASGIApp,
        admission: AdmissionController,
        rates: RateClasses,
        signals: RequestSignals,
    ) -> None:
        self._app = app
        self._admission, self._rates, self._signals = admission, rates, signals

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        rate = scope[RATE] = self._rates.of(scope["method"], scope["path"])
        kind = rate.load
        if rate.route_class is RouteClass.TRANSFER and _is_of_node(scope):
            kind = LoadClass.VITAL
        shed = self._admission.admit(kind, monotonic())
        if shed is not None:
            self._signals.shed[shed.kind].inc()
            await problem(_refusal(shed), scope["path"])(scope, receive, send)
            return
        if kind is LoadClass.VITAL or rate.route_class is RouteClass.STREAM or waits(scope):
            await self._app(scope, receive, send)  # waits for events, not for this server
            return
        work = _ActiveRequest(self._admission, receive, send)
        if scope["method"] in ("GET", "HEAD", "DELETE"):
            work.begin()
        try:
            await self._app(scope, work.receive, work.send)
        finally:
            work.end()


class _ActiveRequest:
    """Counts a request as active from the end of its body to the begin of its answer, which clients cannot prolong."""

    __slots__ = ("_admission", "_is_active", "_receive", "_send")

    def __init__(self, admission: AdmissionController, receive: Receive, send: Send) -> None:
        self._admission, self._receive, self._send = admission, receive, send
        self._is_active = False

    def begin(self) -> None:
        if not self._is_active:
            self._is_active = True
            self._admission.active += 1

    def end(self) -> None:
        if self._is_active:
            self._is_active = False
            self._admission.active -= 1

    async def receive(self) -> Message:
        message = await self._receive()
        if message["type"] == "http.request" and not message.get("more_body", False):
            self.begin()
        return message

    async def send(self, message: Message) -> None:
        self.end()
        await self._send(message)


def _is_of_node(scope: Scope) -> bool:
    """Whether the headers are those of an agent's transfer; the route verifies them."""
    names = {name for name, _ in scope["headers"]}
    return names.issuperset(_OF_NODES)


def _refusal(shed: Shed) -> Overloaded:
    seconds = shed.retry_after_s
    plural = "" if seconds == 1 else "s"
    return Overloaded(
        f"the server is overloaded: {_SUBJECTS[shed.kind]} refused for now; try again in {seconds} second{plural}",
        retry_after=seconds,
    )
