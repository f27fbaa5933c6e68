"""REST documents of prices: offers and quotes."""

from __future__ import annotations

from typing import Literal

from gpool.wire.documents import Answer, EstimateDocument


class OfferDocument(Answer):
    """GPUs of one model and price that the caller could use.

    The price is that of an hour of a whole GPU for the cheapest of the caller's accounts (own, teams). `mtbf_hours`,
    `gigaflops`, `memory_gb_per_s` and `notice_s` are those of the least node; null: unknown for one of them.
    `min_charge_microcredits` is the highest. `tflops_per_credit`: measured TFLOP/s for one credit an hour.
    """

    model: str
    vendor: str
    memory_bytes: int
    simulated: bool
    price_microcredits: int
    min_charge_microcredits: int
    gpus: int
    free: int
    nodes: int
    verified: int
    tiers: list[str]
    notice_s: int
    mtbf_hours: float
    gigaflops: int | None = None
    memory_gb_per_s: int | None = None
    tflops_per_credit: float | None = None


class OfferPage(Answer):
    items: list[OfferDocument]
    next: str | None = None


class RunRange(Answer):
    """Expected run time in seconds, and the range of 80 % of the ended tasks."""

    low: float
    expected: float
    high: float


class CostRange(Answer):
    """Micro-credits."""

    low: int
    expected: int
    high: int


class QuoteDocument(Answer):
    """Expected cost of a submission made now. Amounts are of all its tasks, in micro-credits; `run_s` is of one task.

    `rate_microcredits`: per hour of one task, on all its nodes, where it would start now or else on the cheapest that
    match; `rates`: the lowest and highest of all that match. `known_from`: whose run times the expectation uses; null:
    none are known, so there is no expected cost, only `cost_at_timeout_microcredits`. `starts`: null if unknown.
    """

    tasks: int
    code: Literal["starts", "waits", "nothing_matches"]
    sentence: str
    rate_microcredits: int | None = None
    rates: list[int]
    min_charge_microcredits: int = 0
    known_from: Literal["own", "others"] | None = None
    run_s: RunRange | None = None
    cost: CostRange | None = None
    cost_at_timeout_microcredits: int | None = None
    starts: EstimateDocument | None = None
    offers: list[OfferDocument]
