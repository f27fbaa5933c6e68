"""What a trial asks and when it is too late: never passed by waiting, never answered with another's answer."""

from __future__ import annotations

import hashlib
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpool.core.gpu_verification import (
    FILLED,
    RECOMPUTED,
    VERDICT_TEXT,
    DeviceIdentity,
    GpuVerdict,
    Path,
    Size,
    VerificationTerms,
    VerifiedGpu,
    could_be_one,
    keys_of,
    leads_to,
    may_ask,
    parent,
    round_key,
    terms_for,
)
from gpool.core.model import GIB, Instant, Span
from gpool.server.nodes.gpu_models import packaged_models

TERMS = VerificationTerms(Size(1, 256, 1024), 2, 4, Span(1_000), Span(100))
ROOT, ROOTS = b"r" * 32, (b"a" * 32, b"b" * 32)
instants = st.integers(0, 5_000).map(Instant)


@given(committed=instants, asked=instants, answered=instants)
def test_a_step_that_came_too_late_never_counts(
    committed: Instant, asked: Instant, answered: Instant
) -> None:
    seat = VerifiedGpu(TERMS, Instant(0)).committed(ROOT, committed)
    assert (seat.verdict is GpuVerdict.LATE_COMMIT) == (committed > 1_000)
    seat = seat.asked(asked).answered(ROOTS, Instant(asked + answered))
    if committed <= 1_000:
        assert (seat.verdict is GpuVerdict.LATE_ANSWER) == (answered > 100)
    assert (seat.answer is None) == (seat.verdict is not None)


@given(instants, instants)
def test_nothing_that_comes_after_a_verdict_ever_changes_it(one: Instant, other: Instant) -> None:
    out = VerifiedGpu(TERMS, Instant(0)).judged(GpuVerdict.UNABLE)
    assert out.committed(ROOT, one).asked(one).answered(ROOTS, other).at(other) == out
    assert out.judged(GpuVerdict.PASSED) == out


@pytest.mark.parametrize("roots", [(), (ROOT,), (ROOT, b"short"), (ROOT, ROOT, ROOT)])
def test_an_answer_of_another_form_never_counts(roots: tuple[bytes, ...]) -> None:
    seat = VerifiedGpu(TERMS, Instant(0)).committed(ROOT, Instant(1)).asked(Instant(2))
    assert seat.answered(roots, Instant(3)).verdict is GpuVerdict.MALFORMED


def test_a_second_commitment_and_an_answer_before_the_nonce_never_count() -> None:
    seat = VerifiedGpu(TERMS, Instant(0)).committed(ROOT, Instant(1))
    assert seat.committed(ROOT, Instant(2)).verdict is GpuVerdict.MALFORMED
    assert seat.answered(ROOTS, Instant(2)).verdict is GpuVerdict.MALFORMED


def test_no_nonce_leaves_before_everybody_in_the_sitting_has_committed_or_is_out() -> None:
    waiting = VerifiedGpu(TERMS, Instant(0))
    done, out = waiting.committed(ROOT, Instant(1)), waiting.judged(GpuVerdict.LATE_COMMIT)
    assert not may_ask([done, waiting])
    assert may_ask([done, out])
    assert done.due_at is None  # nobody runs out of time while waiting for others


@given(st.sampled_from(sorted(packaged_models())), st.integers(4, 192))
def test_nobody_with_the_claimed_make_can_ever_compute_much_again_while_answering(
    name: str, gigabytes: int
) -> None:
    make = packaged_models()[name]
    terms = terms_for(gigabytes * GIB, make)
    again = terms.answer_within / 1e6 * make.teraops * 1e12 / terms.size.operations
    assert again <= RECOMPUTED * 1.001 or terms.size.length == 65_536
    assert terms.size.result_bytes <= gigabytes * GIB * FILLED
    assert terms.size.result_bytes >= gigabytes * GIB * (FILLED - 0.02)
    read = terms.rounds * terms.size.result_bytes / (make.gigabytes_per_s * 1e9)
    assert read <= terms.answer_within / 1e6 or terms.rounds == 1


def test_keys_are_never_shared_between_nodes_gpus_trials_or_seeds() -> None:
    base = (b"s" * 32, 1, "GPU-a", 1)
    others = [(b"t" * 32, 1, "GPU-a", 1), (*base[:1], 2, "GPU-a", 1), (*base[:2], "GPU-b", 1)]
    others.append((*base[:3], 2))
    drawn = {keys_of(*each) for each in (base, *others)}
    assert len(drawn) == 5
    assert round_key(b"n", b"a") != round_key(b"n", b"b") != round_key(b"m", b"b")


@given(st.integers(0, 31), st.integers(0, 31), st.integers(0, 3))
def test_a_path_takes_a_digest_to_the_root_from_its_own_place_and_never_from_another(
    tile: int, other: int, spoiled: int
) -> None:
    digests = [number.to_bytes(8, "little") for number in range(100, 132)]
    leaves = [hashlib.sha256(b"".join(digests[i : i + 8])).digest() for i in range(0, 32, 8)]
    left, right = parent(leaves[0], leaves[1]), parent(leaves[2], leaves[3])
    root, at = parent(left, right), tile // 8
    path = Path(b"".join(digests[at * 8 : at * 8 + 8]), (leaves[at ^ 1], right if at < 2 else left))
    assert leads_to(root, tile, 100 + tile, path, 2)
    if other != tile:
        assert not leads_to(root, other, 100 + tile, path, 2)
    assert not leads_to(root, tile, 99, path, 2)
    bad = replace(path, siblings=path.siblings[:1]) if spoiled else replace(path, group=b"")
    assert not leads_to(root, tile, 100 + tile, bad, 2)


@pytest.mark.parametrize(
    "size", [(0, 256, 1024), (1, 100, 1024), (1, 256, 1000), (1, 256, 1 << 20), (1, 0, 1024)]
)
def test_a_size_that_no_kernel_computes_is_refused(size: tuple[int, int, int]) -> None:
    with pytest.raises(ValueError, match="multiple"):
        Size(*size)


def test_gpus_that_could_be_one_device_are_told_from_those_that_cannot() -> None:
    here = DeviceIdentity(1, "bench", "GPU-a", Instant(0))
    far = Instant(10**13)
    assert could_be_one(here, DeviceIdentity(1, "other", "GPU-b", far))
    assert could_be_one(here, DeviceIdentity(2, "bench", "GPU-b", far))
    assert could_be_one(here, DeviceIdentity(2, "other", "GPU-a", far))
    assert could_be_one(here, DeviceIdentity(2, "other", "GPU-b", Instant(1)))
    assert not could_be_one(here, DeviceIdentity(2, "other", "GPU-b", far))
    assert not could_be_one(
        DeviceIdentity(1, "", "GPU-a", Instant(0)), DeviceIdentity(2, "", "GPU-b", far)
    )


def test_every_verdict_says_something_to_the_owner() -> None:
    assert set(VERDICT_TEXT) == set(GpuVerdict)
