"""Texts of `--on`: the owners whose nodes may run a task, and so read its inputs, variables and secrets.
The server resolves the names to ids (`model.Owners`); the planner compares ids only.
"""

from __future__ import annotations

from gpool.core.errors import Invalid
from gpool.core.model import Owners

ANYONE, ME, TEAM = "anyone", "me", "team"
"""`team`: the caller's own nodes, and those of every member of the caller's teams."""

USER_PREFIX, TEAM_PREFIX = "user:", "team:"
MAX_WORDS = 20


def words_of(text: str) -> tuple[str, ...]:
    """Words of `me,team:lab`, sorted, each once; empty for `anyone`. Raises `Invalid` for other words."""
    words = sorted({word.strip() for word in text.split(",")})
    if len(words) > MAX_WORDS:
        raise Invalid(f"'on' has {len(words)} words; at most {MAX_WORDS} can be given")
    if words == [ANYONE]:
        return ()
    for word in words:
        if word == ANYONE:
            raise Invalid(
                "'on' has 'anyone' among other words; give 'anyone' alone or leave it out"
            )
        prefix, colon, name = word.partition(":")
        is_known = word in (ME, TEAM) if not colon else prefix in ("user", "team") and name
        if not is_known:
            raise Invalid(
                f"'on' is {text[:60]!r}; write me, team, team:NAME, user:NAME or anyone, "
                "several of them with commas"
            )
    return tuple(words)


def phrase(on: Owners) -> str:
    """Owners as part of a sentence: `No node of {phrase}`."""
    return " or ".join(_phrase(word) for word in on.asked.split(","))


def _phrase(word: str) -> str:
    if word == ME:
        return "yours"
    if word == TEAM:
        return "yours or of your teams"
    kind, _, name = word.partition(":")
    return f"{kind} {name}"
