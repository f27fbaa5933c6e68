"""Owners whose nodes may run a task: names of `on` are resolved to ids at submission, defaults come from the settings.
Membership of teams counts at the time of planning, so changes of it are folded into the scheduling state at once.
"""

from __future__ import annotations

from collections.abc import Iterable

from gpool.core.errors import NotFound
from gpool.core.ids import UserId
from gpool.core.model import Owners
from gpool.core.permissions import TeamId
from gpool.core.specs.owners import ANYONE, ME, TEAM, TEAM_PREFIX, USER_PREFIX, words_of
from gpool.server.server import Server
from gpool.server.store.identity_values import Caller
from gpool.server.store.operations import nodes
from gpool.server.store.operations.identity import teams, users
from gpool.server.store.protocol import Operation, operation
from gpool.server.store.values import NodeRow


async def accepted_owners(
    server: Server, who: Caller, on: str | None, *, has_secrets: bool
) -> Owners | None:
    """Owners that a task accepts; None: anyone. `NotFound` for a team that is unknown or not the caller's.

    A user's name that nobody has is accepted like that of a user who lends nothing: a refusal would tell which accounts
    exist. Without `on`: the pool's `default_on`; with secrets at most the caller's own nodes and those of its teams.
    """
    if on is None:
        on = server.settings.default_on
        if has_secrets and on == ANYONE:
            on = TEAM
    words = words_of(on)
    if not words:
        return None
    user, own_teams = who.user.id, set(who.teams)
    accepted: set[int] = {user} if ME in words or TEAM in words else set()
    joined: set[int] = set(own_teams) if TEAM in words else set()
    named = [word for word in words if word not in (ME, TEAM)]
    if named:
        found_users, found_teams = await server.store.read(_resolved(named, own_teams))
        accepted |= found_users
        joined |= found_teams
    return Owners(",".join(words), tuple(sorted(accepted)), tuple(sorted(joined)))


@operation
def _resolved(words: Iterable[str], own_teams: set[TeamId]) -> Operation[tuple[set[int], set[int]]]:
    found_users: set[int] = set()
    found_teams: set[int] = set()
    for word in words:
        if word.startswith(TEAM_PREFIX):
            name = word.removeprefix(TEAM_PREFIX)
            team = yield from teams.team_by_name(name)
            if team is None or team.id not in own_teams:
                raise NotFound(
                    f"'on' names the team {name[:64]!r}, and you are not in a team of that name; "
                    "`gpool team ls` lists yours"
                )
            found_teams.add(team.id)
        else:
            name = word.removeprefix(USER_PREFIX)
            user = yield from users.user_by_name(name)
            if user is not None:
                found_users.add(user.id)
    return found_users, found_teams


async def refresh_owners(server: Server, changed: Iterable[UserId]) -> None:
    """Plan with the present teams of these users' nodes. Call it right after the membership is committed.

    The rows are read by the writer: they contain every earlier commit, and a cancelled call invalidates the state.
    """
    for row in await server.write(_nodes_of(sorted(set(changed)))):
        server.picture.node_changed(row.node)


@operation
def _nodes_of(owners: Iterable[UserId]) -> Operation[list[NodeRow]]:
    found: list[NodeRow] = []
    for owner in owners:
        found += yield from nodes.nodes(owner)
    return found
