"""Cheats against the proof of GPU, a hundred times each: none passes, and each would without the defence that stops it.

What they compute is real, on small tiles; how long an H200's terms would take them follows from rates measured on the device's
machine (docs/measurements/gpu-proof.md) or, where that favours the cheat, from the maker's figures.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from random import Random

import numpy as np
import pytest
from numpy.typing import NDArray

from gpool.core.gpu_verification import (
    FILLED,
    TILE,
    TILE_BYTES,
    GpuVerdict,
    Size,
    VerificationKeys,
    VerifiedGpu,
    keys_of,
    may_ask,
    terms_for,
)
from gpool.core.model import GIB, Instant, Span
from gpool.server.nodes.gpu_checks import (
    Claimed,
    Sums,
    Words,
    check_openings,
    kept,
    rows_of,
    tile_rows,
)
from gpool.server.nodes.gpu_models import packaged_models
from tests.tools.gpu_prover import NumpyProver, all_kept

TRIES = 100
SMALL = Size(2, 256, 64)
OPENED = 16
TERMS = terms_for(141 * GIB, packaged_models()["H200"])

PEAK_TERAOPS = 1979.0  # the maker's; cuBLAS reached 1002 on the device
HONEST_TERAOPS = 641.0
HONEST_BYTES_PER_S = 2.87e12
CPU_TERAOPS = 8.4  # int8 by PyTorch, all 16 cores beside the device
HOST_BYTES_PER_S = 0.3e12  # more than the device's machine has


def computing_s(fraction: float, teraops: float) -> float:
    return TERMS.size.operations * fraction / (teraops * 1e12)


def reading_s(fraction: float, bytes_per_s: float) -> float:
    return TERMS.rounds * TERMS.size.result_bytes * fraction / bytes_per_s


def micro(seconds: float) -> Instant:
    return Instant(int(seconds * 1e6))


def fresh(number: int) -> VerificationKeys:
    return keys_of(number.to_bytes(32, "little"), 1, "GPU-a", number)


def hold(prover: NumpyProver, dice: Random, opened: int = OPENED) -> GpuVerdict:
    """All that is said in one trial, in no time. Tiles are drawn as from very many."""
    nonce, root = dice.randbytes(32), prover.commit()
    answer = prover.answer(nonce, root, 2)
    tiles = dice.choices(range(prover.size.tiles), k=opened)
    claimed = Claimed(prover.size, prover.keys, nonce, root, answer)
    return check_openings(claimed, tiles, prover.open(tiles), dice.randbytes(16))


def timed(commit_s: float, answer_s: float) -> GpuVerdict | None:
    """A trial by an H200's terms, whatever is said; None: everything came in time."""
    seat = VerifiedGpu(TERMS, Instant(0)).committed(b"r" * 32, micro(commit_s)).asked(micro(100))
    return seat.answered((b"r" * 32,) * TERMS.rounds, micro(100 + answer_s)).verdict


def test_an_honest_gpu_always_passes() -> None:
    dice = Random(1)
    assert {hold(NumpyProver(SMALL, fresh(n)), dice) for n in range(TRIES)} == {GpuVerdict.PASSED}
    network_s = 0.1
    answer_s = reading_s(1, HONEST_BYTES_PER_S) + network_s
    assert timed(computing_s(1, HONEST_TERAOPS), answer_s) is None


def test_a_processor_is_always_too_late_for_a_gpus_terms() -> None:
    for processors in (1, 2, 10):
        needed = computing_s(1, CPU_TERAOPS * processors)
        assert timed(needed, 0) is GpuVerdict.LATE_COMMIT
    patient = replace(TERMS, commit_within=Span(micro(computing_s(1, CPU_TERAOPS))))
    late = micro(computing_s(1, CPU_TERAOPS) - 1)
    assert (
        VerifiedGpu(patient, Instant(0)).committed(b"r" * 32, late).verdict is None
    )  # the control


# ---- something else than the product

Change = Callable[[NDArray[np.int8]], NDArray[np.int64]]


def product_with(change: Change, size: Size, keys: VerificationKeys, tile: int) -> Sums:
    block, row, column = tile_rows(tile, size.tiles_across)
    a = change(rows_of(keys.stream, 0, block, row, TILE, size.length))
    b = change(rows_of(keys.stream, 1, block, column, TILE, size.length))
    return (a @ b.T).astype("<i4")


SHORTCUTS: dict[str, Change] = {
    "nothing": lambda rows: rows.astype(np.int64) * 0,
    "four low bits": lambda rows: (rows.astype(np.int64) << 60) >> 60,
    "six high bits": lambda rows: rows.astype(np.int64) & ~3,
    "a sixteenth of the length": lambda rows: rows[:, :4].astype(np.int64),
    "all but one of the length": lambda rows: rows[:, 1:].astype(np.int64),
}


class Shortcut(NumpyProver):
    """Keeps X of another product, and opens that or, computed when asked, the right one."""

    def __init__(self, keys: VerificationKeys, change: Change, opens_right: bool) -> None:
        self.change, self.opens_right = change, opens_right
        words = [
            kept(product_with(change, SMALL, keys, tile).reshape(-1)) for tile in range(SMALL.tiles)
        ]
        super().__init__(SMALL, keys, np.stack(words))

    def product(self, tile: int) -> Sums:
        if self.opens_right:
            return super().product(tile)
        return product_with(self.change, self.size, self.keys, tile)


@pytest.mark.parametrize("name", SHORTCUTS)
def test_a_shortcut_through_another_product_never_passes(name: str) -> None:
    dice, change = Random(name), SHORTCUTS[name]
    for number in range(TRIES // 2):
        # Everything but Freivalds' check is in order here: without it, it would pass.
        assert hold(Shortcut(fresh(number), change, False), dice) is GpuVerdict.WRONG_PRODUCT
        # And here everything but the commitment.
        assert hold(Shortcut(fresh(number), change, True), dice) is GpuVerdict.WRONG_COMMIT


class OneElementOff(NumpyProver):
    """Right but for the least significant bit of one element in each tile: X is the same, the product is not."""

    def product(self, tile: int) -> Sums:
        product = super().product(tile).copy()
        product[tile % TILE, tile // 7 % TILE] ^= 1
        return product


def test_a_single_wrong_element_is_always_found() -> None:
    dice = Random(3)
    found = {hold(OneElementOff(SMALL, fresh(n)), dice) for n in range(TRIES)}
    assert GpuVerdict.PASSED not in found


# ---- answers to another question


def test_a_replay_of_another_trial_never_passes() -> None:
    dice = Random(4)
    for number in range(TRIES):
        earlier = NumpyProver(SMALL, fresh(number))
        assert hold(earlier, dice) is GpuVerdict.PASSED  # the control: the trial it was made for
        nonce, root = dice.randbytes(32), earlier.commit()
        answer = earlier.answer(nonce, root, 2)
        tiles = dice.sample(range(SMALL.tiles), OPENED)
        openings = earlier.open(tiles)
        later = Claimed(SMALL, fresh(number + TRIES), nonce, root, answer)
        assert check_openings(later, tiles, openings, b"d") is GpuVerdict.WRONG_COMMIT
        another_nonce = Claimed(SMALL, fresh(number), dice.randbytes(32), root, answer)
        assert check_openings(another_nonce, tiles, openings, b"d") is GpuVerdict.WRONG_ANSWER
        other_tiles = [(tile + 1) % SMALL.tiles for tile in tiles]
        same = Claimed(SMALL, fresh(number), nonce, root, answer)
        assert check_openings(same, other_tiles, openings, b"d") is GpuVerdict.MALFORMED
        moved = [replace(o, tile=t) for o, t in zip(openings, other_tiles, strict=True)]
        assert check_openings(same, other_tiles, moved, b"d") is GpuVerdict.WRONG_COMMIT


# ---- less than the whole

MANY = Size(8, 256, 64)


class Partial(NumpyProver):
    """Computed some of the tiles, and computes an opened one when it is asked for."""

    def __init__(self, keys: VerificationKeys, words: Words, done: float, dice: Random) -> None:
        part = words.copy()
        for tile in dice.sample(range(MANY.tiles), round(MANY.tiles * (1 - done))):
            part[tile] = np.frombuffer(dice.randbytes(TILE_BYTES), np.uint64)
        super().__init__(MANY, keys, part)


@pytest.mark.parametrize("done", [0.5, 0.8, 0.95])
def test_work_done_in_part_never_passes(done: float) -> None:
    keys, dice = fresh(5), Random(done)
    words = all_kept(MANY, keys.stream)
    verdicts = [hold(Partial(keys, words, done, dice), dice, TERMS.opened) for _ in range(TRIES)]
    assert set(verdicts) == {GpuVerdict.WRONG_COMMIT}
    assert (
        hold(Partial(keys, words, 1.0, dice), dice, TERMS.opened) is GpuVerdict.PASSED
    )  # the control


class Forgetful(NumpyProver):
    """Computed everything and had not the memory to keep it."""

    def __init__(self, keys: VerificationKeys, words: Words, keeps: float, dice: Random) -> None:
        super().__init__(MANY, keys, words)
        self.lost = dice.sample(range(MANY.tiles), round(MANY.tiles * (1 - keeps)))

    def answer(self, nonce: bytes, root: bytes, rounds: int) -> tuple[bytes, ...]:
        self.words = self.words.copy()
        self.words[self.lost] = 0
        return super().answer(nonce, root, rounds)


@pytest.mark.parametrize("keeps", [0.5, 0.95])
def test_results_that_were_not_kept_are_always_missed(keeps: float) -> None:
    keys, dice = fresh(6), Random(keeps)
    words = all_kept(MANY, keys.stream)
    verdicts = [hold(Forgetful(keys, words, keeps, dice), dice, TERMS.opened) for _ in range(TRIES)]
    assert set(verdicts) == {GpuVerdict.WRONG_ANSWER}
    assert hold(Forgetful(keys, words, 1.0, dice), dice, TERMS.opened) is GpuVerdict.PASSED


def answerable(device_memory: float) -> float:
    """The part of X that a cheat can answer for in time: kept on the device, computed again at the maker's peak, and read
    from the host's memory, all at once. `device_memory` is a part of what was claimed."""
    within = TERMS.answer_within / 1e6
    kept_there = device_memory / FILLED
    again = within / computing_s(1, PEAK_TERAOPS)
    from_host = within / reading_s(1, HOST_BYTES_PER_S)
    return kept_there + again + from_host


@pytest.mark.parametrize("gigabytes", [24, 40, 80])
def test_less_memory_than_claimed_is_always_too_little(gigabytes: int) -> None:
    assert answerable(gigabytes / 141) < 1
    missing = 1 - gigabytes / 141 / FILLED
    assert timed(1, computing_s(missing, PEAK_TERAOPS)) is GpuVerdict.LATE_ANSWER
    assert timed(1, reading_s(missing, HOST_BYTES_PER_S)) is GpuVerdict.LATE_ANSWER
    assert answerable(1) >= 1  # the control: the claimed memory is enough


# ---- two identities on one device


def sitting(order: Sequence[tuple[float, int]], together: bool) -> list[VerifiedGpu]:
    """One device computes for two in turn at the peak rate; its memory holds one X. `order` is (seconds, whose commitment)."""
    seats = [VerifiedGpu(TERMS, Instant(0)), VerifiedGpu(TERMS, Instant(0))]
    answer_s = reading_s(1, HONEST_BYTES_PER_S)
    roots = (b"r" * 32,) * TERMS.rounds
    for at, who in order:
        seats[who] = seats[who].committed(b"r" * 32, micro(at))
        if not together:  # asked at once: its X is still there
            seats[who] = seats[who].asked(micro(at)).answered(roots, micro(at + answer_s))
    if together and may_ask(seats):
        at = max(seconds for seconds, _ in order)
        missing = 1 - (1 / FILLED - 1)  # of the second X, beside the first
        seats[0] = seats[0].asked(micro(at)).answered(roots, micro(at + answer_s))
        again_s = computing_s(missing, PEAK_TERAOPS) + answer_s
        seats[1] = seats[1].asked(micro(at)).answered(roots, micro(at + again_s))
    return seats


def test_two_identities_on_one_device_never_pass_both() -> None:
    alone_s = computing_s(1, PEAK_TERAOPS)
    order = [(alone_s, 0), (2 * alone_s + 1, 1)]
    assert [seat.verdict for seat in sitting(order, True)] == [None, GpuVerdict.LATE_ANSWER]
    assert [seat.verdict for seat in sitting(order, False)] == [None, None]  # the control
    assert answerable(1 - FILLED) < 1  # nor does the host's memory help the second
