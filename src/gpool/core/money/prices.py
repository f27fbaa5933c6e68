"""Prices that owners ask, per hour, and whom they lend to for free. Integer micro-credits; pure."""

from __future__ import annotations

import re
from dataclasses import dataclass

from gpool.core.errors import Invalid
from gpool.core.ids import UserId
from gpool.core.model import Gpu, Node, Offer
from gpool.core.specs.fields import CREDIT, format_price, parse_price
from gpool.core.specs.gpu import is_model, normalise

MAX_ENTRIES = 100
"""Prices of single models or GPUs in one text."""

MAX_MINIMUM = 1_000 * CREDIT
MAX_NOTICE_S = 7 * 86_400

_INDEX = re.compile(r"gpu(\d{1,4})", re.ASCII | re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class AskedPrices:
    """Micro-credits per hour of a GPU, or (`usual`) of a machine without GPUs. The narrowest entry applies."""

    usual: int = 0
    models: tuple[tuple[str, int], ...] = ()  # by normalised model: "RTX4090"
    gpus: tuple[tuple[int, int], ...] = ()  # by index

    def of_gpu(self, gpu: Gpu) -> int | None:
        """Price of this GPU where it differs from the usual one; None: the usual one."""
        found = next((price for index, price in self.gpus if index == gpu.index), None)
        if found is None:
            found = next((price for name, price in self.models if is_model(name, gpu.model)), None)
        return None if found == self.usual else found


def parse_prices(text: str | int | float) -> AskedPrices:
    """Parse `0.31/h`, or entries joined by commas: `0.31/h,H100=2.00/h,gpu0=0/h`."""
    usual, models, gpus = None, dict[str, int](), dict[int, int]()
    entries = str(text).split(",")
    if len(entries) > MAX_ENTRIES:
        raise Invalid(f"{len(entries)} prices; at most {MAX_ENTRIES} can be given")
    for entry in entries:
        name, has_name, price = entry.rpartition("=")
        name = name.strip()
        if not has_name and usual is None:
            usual = parse_price(price)
            continue
        index, model = _INDEX.fullmatch(name), normalise(name)
        if index is not None and int(index[1]) not in gpus:
            gpus[int(index[1])] = parse_price(price)
        elif index is None and model and model not in models:
            models[model] = parse_price(price)
        else:
            raise Invalid(
                f"the price {entry.strip()[:60]!r} names no GPU, or one that has a price already; "
                "write 0.31/h,H100=2.00/h,gpu0=0/h"
            )
    return AskedPrices(usual or 0, tuple(models.items()), tuple(gpus.items()))


def parse_credits(amount: str | int | float, most: int = MAX_MINIMUM) -> int:
    """Parse an amount of credits, like `0.05`, to micro-credits."""
    try:
        found = parse_price(amount)
    except Invalid as error:
        raise Invalid(
            error.detail.replace("credits per hour, like 0.40/h", "credits, like 0.05")
        ) from None
    if "/" in str(amount) or found > most:
        raise Invalid(
            f"{str(amount)[:40]!r} is not an amount of up to {most // CREDIT} credits, like 0.05"
        )
    return found


def format_credits(microcredits: int) -> str:
    return format_price(microcredits).removesuffix("/h")


def is_priced(offer: Offer) -> bool:
    return bool(offer.price_microcredits) or any(gpu.price_microcredits for gpu in offer.gpus)


def gpu_hour(node: Node, gpu: Gpu) -> int:
    """Asked for an hour of the whole GPU."""
    own = gpu.price_microcredits
    return node.offer.price_microcredits if own is None else own


def node_hour(node: Node) -> int:
    """Asked for an hour of the whole node: of all its GPUs, or of itself if it has none."""
    offer = node.offer
    if not offer.gpus:
        return offer.price_microcredits
    return sum(gpu_hour(node, gpu) for gpu in offer.gpus)


def is_free_for(node: Node, user: UserId, team: int | None) -> bool:
    """Whether this account's tasks cost nothing here: the owner's own, and those of users and teams the owner named."""
    free = node.free_for
    if user == node.owner:
        return True
    return free is not None and (user in free.users or team in free.teams)
