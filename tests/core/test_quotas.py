"""Quotas: what fits, what does not, and that a lowered limit never stops what was not asked for."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from gpool.core.quotas import Over, Quota, QuotaUsage, within_quota, within_quotas

amounts = st.integers(0, 50)
usages = st.builds(QuotaUsage, amounts, amounts, amounts)
limits = st.none() | amounts
quotas = st.builds(Quota, limits, limits, limits)


def total(used: QuotaUsage, asked: QuotaUsage) -> list[int]:
    return [
        used.running_gpu_milli + asked.running_gpu_milli,
        used.queued_tasks + asked.queued_tasks,
        used.storage_bytes + asked.storage_bytes,
    ]


@given(usages, quotas, usages)
def test_what_is_let_through_never_passes_a_limit_it_adds_to(
    used: QuotaUsage, quota: Quota, ask: QuotaUsage
) -> None:
    most = [quota.running_gpu_milli, quota.queued_tasks, quota.storage_bytes]
    asked = [ask.running_gpu_milli, ask.queued_tasks, ask.storage_bytes]
    fits = all(
        limit is None or not more or sum_ <= limit
        for limit, more, sum_ in zip(most, asked, total(used, ask), strict=True)
    )
    assert (within_quota(used, quota, ask) is None) == fits


@given(usages, quotas)
def test_asking_for_nothing_is_always_within(used: QuotaUsage, quota: Quota) -> None:
    assert within_quota(used, quota, QuotaUsage()) is None


@given(usages, usages)
def test_no_limit_is_never_passed(used: QuotaUsage, ask: QuotaUsage) -> None:
    assert within_quota(used, Quota(), ask) is None


def test_the_first_of_several_quotas_that_is_passed_is_named() -> None:
    mine = (QuotaUsage(queued_tasks=1), Quota(queued_tasks=10))
    teams = (QuotaUsage(queued_tasks=9), Quota(queued_tasks=10))
    over = within_quotas([mine, teams], QuotaUsage(queued_tasks=2))
    assert over == Over("queued_tasks", 9, 2, 10)
    assert over.sentence == "9 of 10 tasks waiting; 2 more do not fit"
    assert within_quotas([mine, teams], QuotaUsage(queued_tasks=1)) is None
