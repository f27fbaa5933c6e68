"""What has to be tried out is asked anew after a while, sooner where it failed, and nobody waits for that."""

from __future__ import annotations

from collections.abc import Callable

from gpool.agent.runtime.docker.network import RENEW_AFTER_S, RENEW_FAILED_AFTER_S, ProbeCache


class Bench:
    """A probe whose time, answers and other thread are the test's."""

    def __init__(self, *answers: str) -> None:
        self.now = 0.0
        self.answers = list(answers)
        self.begun: list[Callable[[], None]] = []
        self.probe = ProbeCache(self._ask, self.begun.append, lambda: self.now)

    def _ask(self) -> str:
        return self.answers.pop(0)

    def finish(self) -> None:
        for each in self.begun:
            each()
        self.begun.clear()


def test_it_is_asked_once_and_then_known() -> None:
    bench = Bench("", "never")
    assert [bench.probe.why_not() for _ in range(3)] == ["", "", ""]
    bench.now = RENEW_AFTER_S - 1
    assert bench.probe.why_not() == ""
    assert bench.begun == []


def test_where_it_failed_it_is_asked_again_soon() -> None:
    bench = Bench("no nsenter", "")
    assert bench.probe.why_not() == "no nsenter"
    bench.now = RENEW_FAILED_AFTER_S - 1
    assert (bench.probe.why_not(), bench.begun) == ("no nsenter", [])
    bench.now = RENEW_FAILED_AFTER_S
    assert bench.probe.why_not() == "no nsenter"  # nobody waits
    bench.finish()
    assert bench.probe.why_not() == ""


def test_where_it_worked_it_is_asked_again_after_a_while() -> None:
    bench = Bench("", "the engine changed")
    assert bench.probe.why_not() == ""
    bench.now = RENEW_AFTER_S
    assert bench.probe.why_not() == ""
    bench.finish()
    assert bench.probe.why_not() == "the engine changed"


def test_it_is_never_asked_twice_at_once() -> None:
    bench = Bench("bad", "bad", "")
    bench.probe.why_not()
    bench.now = RENEW_FAILED_AFTER_S
    for _ in range(5):
        bench.probe.why_not()
    assert len(bench.begun) == 1
    bench.finish()
    bench.now = 2 * RENEW_FAILED_AFTER_S
    bench.probe.why_not()
    bench.finish()
    assert bench.probe.why_not() == ""


def test_whoever_is_gone_is_not_asked() -> None:
    def refuses(_work: Callable[[], None]) -> None:
        raise RuntimeError("shut down")

    now = [0.0]
    probe = ProbeCache(lambda: "bad", refuses, lambda: now[0])
    probe.why_not()
    now[0] = RENEW_FAILED_AFTER_S
    assert [probe.why_not(), probe.why_not()] == ["bad", "bad"]
