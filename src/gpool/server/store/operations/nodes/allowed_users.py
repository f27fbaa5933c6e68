"""Whose tasks an owner takes: the names in an offer, and who they are now. Names nobody has are told, and let nobody in.

Asked whenever a node's row is read, so a user or team that came, went or was renamed since counts as of then.
"""

from __future__ import annotations

from collections.abc import Iterable

from gpool.core.model import Audience, Offer
from gpool.server.store.protocol import Operation, Statement
from gpool.server.store.rows import of_names

ME, USER, TEAM = "me", "user:", "team:"
Known = tuple[dict[str, int], dict[str, int]]
"""Users and teams by name."""


def known_names(offers: Iterable[Offer]) -> Operation[Known]:
    """Those that these offers speak of. Costs nothing where none does."""
    words = {word for offer in offers for word in offer.audience}
    users = yield from _named("users", USER, words)
    teams = yield from _named("teams", TEAM, words)
    return users, teams


def _named(table: str, prefix: str, words: set[str]) -> Operation[dict[str, int]]:
    names = of_names(word.removeprefix(prefix) for word in words if word.startswith(prefix))
    if not names.rows:
        return {}
    rows = yield Statement(
        f"SELECT w.name, f.id FROM {{names}} AS w JOIN {table} f ON f.name = w.name",  # noqa: S608
        {},
        {"names": names},
    )
    return dict(rows)


def resolved(offer: Offer, known: Known) -> tuple[Audience | None, tuple[str, ...]]:
    """Who that is (None: anyone) and what is wrong with the names."""
    if not offer.audience:
        return None, ()
    users, teams = known
    found_users, found_teams, problems = set(), set(), []
    for word in offer.audience:
        name = word.partition(":")[2]
        if word == ME:
            continue  # an owner's own tasks are always taken
        if word.startswith(USER) and name in users:
            found_users.add(users[name])
        elif word.startswith(TEAM) and name in teams:
            found_teams.add(teams[name])
        elif word.startswith((USER, TEAM)):
            problems.append(f"its audience names {word}, which is not known here")
        else:
            problems.append(f"its audience holds {word!r}; write me, user:NAME or team:NAME")
    return Audience(frozenset(found_users), frozenset(found_teams)), tuple(problems)
