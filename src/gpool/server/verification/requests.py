"""Options of verified tasks in a request: refused combinations, and the number of siblings."""

from __future__ import annotations

from gpool.core.errors import Invalid
from gpool.core.trust.checks import OWNERS_OF_A_CHECK
from gpool.core.trust.rounds import SPOT
from gpool.wire.documents import TaskRequest


def siblings_of(request: TaskRequest) -> int:
    if isinstance(request.verify, str):
        return SPOT if request.verify == "spot" else OWNERS_OF_A_CHECK
    return request.verify or 0


def _check_checked(request: TaskRequest) -> None:
    """Refuse a check function without `verify="check"`, and the other way round."""
    if request.verify != "check":
        if request.check is not None:
            raise Invalid(
                "'check' is given and 'verify' is not \"check\"; add verify=\"check\", or leave 'check' out"
            )
        return
    if request.function is None:
        raise Invalid(
            "'verify' is \"check\" and this is a command; a check function gets the value of a function: use "
            '@gpool.task(verify="check", check=...) in Python, or verify 2 or 3'
        )
    if request.check is None:
        raise Invalid("'verify' is \"check\" and 'check' is not given; name the check function")
    if request.compare != "hash":
        raise Invalid(
            f"'compare' is {request.compare} and 'verify' is \"check\", which compares no answers: leave 'compare' out"
        )


def _check_compared(request: TaskRequest) -> None:
    """Refuse a comparator where no answers of functions are compared, or where a tolerance compares them."""
    if request.comparator is None:
        return
    if request.verify is None or request.verify == "check":
        raise Invalid(
            "'comparator' is given and 'verify' is not 2, 3 or \"spot\"; a comparator compares the answers of several "
            "owners: add verify=2, or leave 'comparator' out"
        )
    if request.function is None:
        raise Invalid(
            "'comparator' is given and this is a command; a comparator gets the values of a function: use "
            "@gpool.task(verify=2, compare=...) in Python, or leave 'comparator' out"
        )
    if request.compare != "hash":
        raise Invalid(
            f"'compare' is {request.compare} and 'comparator' is given; answers are compared in one way: leave out one "
            "of the two"
        )


def check_verified(request: TaskRequest) -> None:
    """Refuse options with which independent owners could not give comparable answers."""
    _check_checked(request)
    _check_compared(request)
    if request.verify is None:
        if request.compare != "hash":
            raise Invalid(
                f"'compare' is {request.compare} and 'verify' is not given; a tolerance compares the answers of a "
                "verified task: add verify=2, or leave 'compare' out"
            )
        return
    if request.compare != "hash" and request.function is None:
        raise Invalid(
            f"'compare' is {request.compare} and this is a command, whose outputs are compared by hash; a tolerance "
            "compares numbers in the value of a function: leave 'compare' out"
        )
    for is_given, name, why in (
        (request.nodes > 1, "nodes", "a gang runs at one site, mostly on nodes of one owner"),
        (bool(request.secrets), "secrets", "every owner whose node runs it could read them"),
        (request.tier == "none", "tier 'none'", "it is given on your own nodes only"),
        (request.checkpoint is not None, "checkpoint", "siblings share no state"),
        (request.max_cost is not None, "max_cost", "it bounds one run; use max_price"),
    ):
        if is_given:
            raise Invalid(
                f"'verify' and {name} exclude each other: {why}; leave out one of the two"
            )
