"""Who may do what: never a stranger, never a viewer's change, never more with fewer scopes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpool.core.ids import NodeId, UserId
from gpool.core.model import Permission
from gpool.core.permissions import (
    ALLOWED,
    HIDDEN,
    POOL,
    RULES,
    AccessOutcome,
    AccessRelation,
    Action,
    Actor,
    Nobody,
    NodeActor,
    ObjectKind,
    PermissionRule,
    Person,
    Role,
    Scope,
    TeamId,
    Thing,
    as_markdown,
    may,
    missing,
    whole,
)

ME, OTHER, THIRD = UserId(1), UserId(2), UserId(3)
MY_TEAM, THEIR_TEAM = TeamId(10), TeamId(11)
EVERYTHING = frozenset(Permission)
COMMON = frozenset({Permission.CONSUMER, Permission.PROVIDER})

actions = st.sampled_from(list(Action))
permissions = st.frozensets(st.sampled_from(list(Permission)))
scopes = st.none() | st.frozensets(st.sampled_from(list(Scope)))
users = st.sampled_from([ME, OTHER, THIRD])
teams = st.sampled_from([MY_TEAM, THEIR_TEAM])
nodes = st.sampled_from([NodeId(20), NodeId(21)])
people = st.builds(
    Person, users, permissions, st.dictionaries(teams, st.sampled_from(list(Role))), scopes
)
actors: st.SearchStrategy[Actor] = st.one_of(st.just(Nobody()), people, st.builds(NodeActor, nodes))


@st.composite
def asked(draw: st.DrawFn) -> tuple[Action, Thing]:
    """An action, and a thing of its kind."""
    action = draw(actions)
    kind = RULES[action].kind
    if kind is ObjectKind.SERVER:
        return action, POOL
    return action, Thing(
        kind,
        owner=draw(st.none() | users),
        team=draw(st.none() | teams),
        node_owner=draw(st.none() | users),
        holder=draw(st.none() | nodes),
        exists=draw(st.booleans()),
    )


def of(action: Action, **facts: object) -> Thing:
    return Thing(RULES[action].kind, **facts)  # type: ignore[arg-type]


def person(*given: Permission, scopes: frozenset[Scope] | None = None, **roles: Role) -> Person:
    known = {"mine": MY_TEAM, "theirs": THEIR_TEAM}
    held = frozenset(given) or COMMON
    return Person(ME, held, {known[name]: role for name, role in roles.items()}, scopes)


@given(actors, asked())
def test_every_question_has_an_answer_with_a_reason_unless_allowed(
    actor: Actor, question: tuple[Action, Thing]
) -> None:
    decision = may(actor, *question)
    assert decision.allowed == (decision.outcome is AccessOutcome.ALLOWED)
    assert decision.allowed or decision.reason


@given(people, asked())
def test_a_stranger_is_never_allowed_anything_that_is_not_for_everybody(
    who: Person, question: tuple[Action, Thing]
) -> None:
    action, thing = question
    rule = RULES[action]
    stranger = replace(
        who, id=UserId(99), permissions=who.permissions - {Permission.OPERATOR}, teams={}
    )
    if not rule.may & {AccessRelation.ANYONE, AccessRelation.SIGNED_IN}:
        assert not may(stranger, action, thing).allowed


@given(actors, actions, scopes)
def test_a_strangers_thing_and_a_missing_one_always_answer_alike(
    actor: Actor, action: Action, held: frozenset[Scope] | None
) -> None:
    """Whoever the actor is, but for operators, who see everything, and for what everybody may see."""
    rule = RULES[action]
    if rule.kind is ObjectKind.SERVER or AccessRelation.SIGNED_IN in rule.may:
        return
    if isinstance(actor, Person):
        actor = replace(actor, permissions=actor.permissions - {Permission.OPERATOR}, scopes=held)
    foreign = Thing(
        rule.kind, owner=UserId(98), team=None, node_owner=UserId(97), holder=NodeId(96)
    )
    assert may(actor, action, foreign) == may(actor, action, missing(rule.kind))
    assert may(actor, action, replace(foreign, team=TeamId(95))) == may(
        actor, action, missing(rule.kind)
    )


@given(people, asked())
def test_a_viewer_never_changes_what_belongs_to_the_team(
    who: Person, question: tuple[Action, Thing]
) -> None:
    """Not even what they made themselves, before they became a viewer."""
    action, thing = question
    rule = RULES[action]
    viewer = replace(
        who, permissions=who.permissions - {Permission.OPERATOR}, teams={MY_TEAM: Role.VIEWER}
    )
    if rule.changes and rule.kind is not ObjectKind.SERVER:
        assert not may(viewer, action, replace(thing, team=MY_TEAM)).allowed


@given(people, asked(), st.frozensets(st.sampled_from(list(Scope))))
def test_fewer_scopes_never_allow_more(
    who: Person, question: tuple[Action, Thing], taken: frozenset[Scope]
) -> None:
    narrower = frozenset(Scope) - taken if who.scopes is None else who.scopes - taken
    if may(replace(who, scopes=narrower), *question).allowed:
        assert may(who, *question).allowed


@given(people, asked(), st.sampled_from(list(Permission)))
def test_fewer_permissions_never_allow_more(
    who: Person, question: tuple[Action, Thing], taken: Permission
) -> None:
    fewer = replace(who, permissions=who.permissions - {taken})
    assert may(who, *question).allowed >= may(fewer, *question).allowed


@given(people, asked())
def test_leaving_a_team_never_allows_more(who: Person, question: tuple[Action, Thing]) -> None:
    assert may(who, *question).allowed >= may(replace(who, teams={}), *question).allowed


@given(actions, permissions, st.dictionaries(teams, st.sampled_from(list(Role))))
def test_a_key_never_does_what_only_a_sign_in_may(
    action: Action, held: frozenset[Permission], roles: dict[TeamId, Role]
) -> None:
    rule = RULES[action]
    if rule.scope is None and AccessRelation.ANYONE not in rule.may:
        key = Person(ME, held, roles, frozenset(Scope))
        thing = POOL if rule.kind is ObjectKind.SERVER else Thing(rule.kind, owner=ME)
        assert may(key, action, thing).outcome is AccessOutcome.REFUSED


@given(asked())
def test_nobody_is_asked_to_sign_in_whatever_the_thing_is(question: tuple[Action, Thing]) -> None:
    action, thing = question
    if AccessRelation.ANYONE not in RULES[action].may:
        assert may(Nobody(), action, thing).outcome is AccessOutcome.SIGN_IN


@given(actions, asked(), nodes)
def test_a_node_never_acts_for_its_owner(
    action: Action, question: tuple[Action, Thing], node: NodeId
) -> None:
    action, thing = question
    decision = may(NodeActor(node), action, replace(thing, holder=None))
    assert not decision.allowed or AccessRelation.ANYONE in RULES[action].may


@pytest.mark.parametrize(
    "action",
    [
        Action.TASK_SUBMIT,
        Action.KEY_MAKE,
        Action.WALLET_LINK,
        Action.WALLET_UNLINK,
        Action.PASSWORD_CHANGE,
        Action.PAYOUT_WALLET_SET,
        Action.NODE_INVITE,
        Action.NODE_JOIN,
        Action.TEAM_MAKE,
        Action.BATCH_EXTEND,
    ],
)
def test_an_operator_never_acts_in_somebody_elses_name(action: Action) -> None:
    operator = Person(ME, EVERYTHING)
    assert not may(operator, action, of(action, owner=OTHER)).allowed


@pytest.mark.parametrize("action", [a for a in Action if RULES[a].may == {AccessRelation.OPERATOR}])
def test_what_is_for_operators_is_refused_to_everybody_else(action: Action) -> None:
    thing = POOL if RULES[action].kind is ObjectKind.SERVER else of(action, owner=ME)
    assert may(person(), action, thing).outcome is AccessOutcome.REFUSED
    assert may(Person(ME, EVERYTHING), action, thing) == ALLOWED


REFUSED = AccessOutcome.REFUSED
OK = AccessOutcome.ALLOWED
GONE = AccessOutcome.HIDDEN
TEAMS_TASK = {"owner": OTHER, "team": MY_TEAM}


@pytest.mark.parametrize(
    ("who", "action", "facts", "outcome"),
    [
        (person(), Action.TASK_READ, {"owner": ME}, OK),
        (person(), Action.TASK_READ, {"owner": OTHER}, GONE),
        (person(), Action.TASK_READ, {"owner": OTHER, "node_owner": ME}, GONE),
        (person(Permission.OPERATOR), Action.TASK_READ, {"owner": OTHER}, OK),
        (person(mine=Role.VIEWER), Action.TASK_READ, TEAMS_TASK, OK),
        (person(mine=Role.VIEWER), Action.TASK_CANCEL, TEAMS_TASK, REFUSED),
        (person(mine=Role.MEMBER), Action.TASK_CANCEL, TEAMS_TASK, REFUSED),
        (person(mine=Role.OWNER), Action.TASK_CANCEL, TEAMS_TASK, OK),
        (person(theirs=Role.OWNER), Action.TASK_CANCEL, TEAMS_TASK, GONE),
        (person(), Action.TASK_READ, {"owner": ME, "team": MY_TEAM}, GONE),  # left the team
        (person(mine=Role.MEMBER), Action.TASK_CANCEL, {"owner": ME, "team": MY_TEAM}, OK),
        (person(mine=Role.MEMBER), Action.TASK_SUBMIT, {"team": MY_TEAM}, OK),
        (person(mine=Role.VIEWER), Action.TASK_SUBMIT, {"team": MY_TEAM}, REFUSED),
        (person(), Action.TASK_SUBMIT, {"team": MY_TEAM}, GONE),
        (person(Permission.PROVIDER), Action.TASK_SUBMIT, {"owner": ME}, REFUSED),
        (person(Permission.CONSUMER), Action.NODE_INVITE, {"owner": ME}, REFUSED),
        (person(), Action.NODE_READ, {"owner": OTHER}, OK),
        (person(), Action.NODE_CHANGE, {"owner": OTHER}, GONE),
        (person(), Action.NODE_CHANGE, {"owner": ME}, OK),
        (person(), Action.NODE_REPORT, {"owner": ME}, REFUSED),
        (person(mine=Role.MEMBER), Action.TEAM_ROLE_SET, {"team": MY_TEAM}, REFUSED),
        (person(mine=Role.OWNER), Action.TEAM_ROLE_SET, {"team": MY_TEAM}, OK),
        (person(), Action.TEAM_READ, {"team": MY_TEAM}, GONE),
        (person(scopes=frozenset({Scope.TASKS_READ})), Action.TASK_READ, {"owner": ME}, OK),
        (person(scopes=frozenset({Scope.TASKS_READ})), Action.TASK_CANCEL, {"owner": ME}, REFUSED),
        (
            person(scopes=frozenset({Scope.TASKS_READ})),
            Action.TASK_CANCEL,
            {"owner": OTHER},
            REFUSED,
        ),
        (NodeActor(NodeId(20)), Action.NODE_REPORT, {"owner": ME, "holder": NodeId(20)}, OK),
        (NodeActor(NodeId(20)), Action.NODE_REPORT, {"owner": ME, "holder": NodeId(21)}, GONE),
        (NodeActor(NodeId(20)), Action.ARTIFACT_READ, {"owner": ME, "holder": NodeId(20)}, OK),
        (NodeActor(NodeId(20)), Action.ARTIFACT_READ, {"owner": ME}, GONE),
        (NodeActor(NodeId(20)), Action.TASK_CANCEL, {"owner": ME, "holder": NodeId(20)}, REFUSED),
    ],
)
def test_worked_examples(
    who: Actor, action: Action, facts: dict[str, object], outcome: AccessOutcome
) -> None:
    assert may(who, action, of(action, **facts)).outcome is outcome


def test_an_action_without_a_row_stops_the_import() -> None:
    incomplete = {action: rule for action, rule in RULES.items() if action is not Action.TASK_READ}
    with pytest.raises(AssertionError, match=r"no rule for task\.read"):
        whole(incomplete)


@pytest.mark.parametrize(
    ("rule", "complaint"),
    [
        (PermissionRule(ObjectKind.TASK, frozenset(), None, True), "nobody may"),
        (
            PermissionRule(ObjectKind.TASK, frozenset({AccessRelation.TEAM_VIEWER}), None, True),
            "a viewer could",
        ),
        (
            PermissionRule(ObjectKind.TASK, frozenset({AccessRelation.ANYONE}), None, False),
            "anyone could",
        ),
    ],
)
def test_a_row_that_makes_no_sense_stops_the_import(rule: PermissionRule, complaint: str) -> None:
    with pytest.raises(AssertionError, match=complaint):
        whole({**RULES, Action.TASK_READ: rule})


def test_asking_about_a_thing_of_another_kind_is_a_bug_and_says_so() -> None:
    with pytest.raises(AssertionError, match="acts on a task, not on a node"):
        may(person(), Action.TASK_READ, Thing(ObjectKind.NODE, owner=ME))


def test_a_missing_thing_is_hidden_even_from_operators() -> None:
    assert may(Person(ME, EVERYTHING), Action.TASK_READ, missing(ObjectKind.TASK)) == HIDDEN


def test_a_naive_rule_without_standing_would_let_strangers_in() -> None:
    """The control: with `signed in` in the row the very same question is allowed."""
    careless = replace(RULES[Action.TASK_READ], may=frozenset({AccessRelation.SIGNED_IN}))
    assert whole({**RULES, Action.TASK_READ: careless})
    assert may(person(), Action.NODE_READ, of(Action.NODE_READ, owner=OTHER)).allowed
    assert not may(person(), Action.TASK_READ, of(Action.TASK_READ, owner=OTHER)).allowed


def test_the_page_is_what_the_table_says() -> None:
    page = Path(__file__).resolve().parents[2] / "docs" / "permissions.md"
    assert page.read_text() == as_markdown()
