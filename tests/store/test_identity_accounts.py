"""Accounts and the ways into them, invites, nonces, what operators change."""

from __future__ import annotations

import pytest

from gpool.core.errors import Conflict, Forbidden, NotFound
from gpool.core.ids import UserId
from gpool.core.model import Instant, Permission
from gpool.core.permissions import Role
from gpool.server.store.identity_values import UserInvite
from gpool.server.store.operations.identity import accounts, sessions, teams, users
from gpool.server.store.values import User
from tests.store.store_pool import Database, Pool, race
from tests.store.test_identity_sessions import opened_session

WALLET, OTHER = "0x" + "a" * 40, "0x" + "b" * 40
OIDC = ("https://id.example", "subject-1")


def newcomer(pool: Pool, name: str) -> User:
    return User(UserId(next(pool.numbers)), name, frozenset({Permission.CONSUMER}), pool.now())


def invited(pool: Pool, hashed: str = "h", **further: object) -> UserInvite:
    at = pool.now()
    given = {"permissions": frozenset({Permission.PROVIDER}), "expires_at": Instant(at + 10**9)}
    made = UserInvite(hashed, pool.ann, created_at=at, **(given | further))
    pool.write(accounts.create_user_invite(made))
    return made


def test_an_account_is_found_by_every_way_into_it(pool: Pool) -> None:
    bob = newcomer(pool, "bob")
    pool.write(accounts.register(bob, "argon", WALLET, None, pool.now(), OIDC))
    account = pool.read(accounts.account(bob.id))
    assert (account.user, account.password_hash, account.disabled) == (bob, "argon", False)
    assert "argon" not in repr(account)
    assert pool.read(accounts.account_by_name("bob")) == account
    assert pool.read(accounts.user_by_wallet(WALLET)) == account
    assert pool.read(accounts.user_by_oidc(*OIDC)) == account
    assert pool.read(accounts.identities_of(bob.id)) == (OIDC,)
    assert pool.read(accounts.payout_wallet(bob.id)) == WALLET
    for nobody in (
        accounts.account(UserId(1)),
        accounts.account_by_name("x"),
        accounts.user_by_wallet(OTHER),
        accounts.user_by_oidc(OIDC[0], "x"),
    ):
        assert pool.read(nobody) is None


def test_an_account_without_a_way_in_is_not_made(pool: Pool) -> None:
    with pytest.raises(Conflict, match="login method"):
        pool.account("bob")


def test_a_name_a_wallet_or_an_identity_in_use_is_refused_and_nothing_is_written(
    pool: Pool,
) -> None:
    pool.account("bob", wallet=WALLET, oidc=OIDC)
    for name, ways in (
        ("bob", {"password_hash": "x"}),
        ("eve", {"wallet": WALLET}),
        ("eve", {"oidc": OIDC}),
    ):
        with pytest.raises(Conflict):
            pool.account(name, **ways)
    assert pool.read(accounts.account_by_name("eve")) is None


def test_of_many_who_register_one_name_at_once_one_gets_it(pool: Pool, database: Database) -> None:
    made = [
        accounts.register(newcomer(pool, "bob"), "x", None, None, pool.now()) for _ in range(12)
    ]
    answers = race(database, made)
    assert sum(isinstance(answer, User) for answer in answers) == 1
    assert sum(isinstance(answer, Conflict) for answer in answers) == 11


def test_of_many_first_sign_ins_with_one_wallet_one_makes_the_account(
    pool: Pool, database: Database
) -> None:
    made = [
        accounts.register(newcomer(pool, f"w{i}"), None, WALLET, None, pool.now())
        for i in range(12)
    ]
    answers = race(database, made)
    (winner,) = [answer for answer in answers if isinstance(answer, User)]
    assert pool.read(accounts.user_by_wallet(WALLET)).user == winner
    assert len(pool.read(accounts.users(UserId(0), 100))) == 2  # ann, and the winner


# ---- invites


def test_an_invite_decides_the_permissions_and_the_team(pool: Pool) -> None:
    team = pool.team("lab")
    invited(pool, team=team, role=Role.MEMBER)
    done = pool.write(accounts.register(newcomer(pool, "bob"), "x", None, "h", pool.now()))
    assert done.permissions == {Permission.PROVIDER}
    assert pool.read(users.user(done.id)) == done
    assert pool.read(teams.teams_of(done.id)) == {team: Role.MEMBER}


def test_an_invite_works_once_and_not_after_its_time(pool: Pool) -> None:
    invite = invited(pool)
    pool.account("bob", password_hash="x", invite_hash="h")
    with pytest.raises(Forbidden, match="used"):
        pool.account("eve", password_hash="x", invite_hash="h")
    with pytest.raises(Forbidden, match="not known"):
        pool.account("eve", password_hash="x", invite_hash="made up")
    late = invited(pool, "late", expires_at=invite.created_at)
    with pytest.raises(Forbidden, match="expired"):
        pool.account("eve", password_hash="x", invite_hash=late.hashed)
    assert pool.read(accounts.account_by_name("eve")) is None


def test_of_many_who_redeem_one_invite_at_once_one_comes_in(pool: Pool, database: Database) -> None:
    invited(pool)
    made = [
        accounts.register(newcomer(pool, f"u{i}"), "x", None, "h", pool.now()) for i in range(12)
    ]
    answers = race(database, made)
    assert sum(isinstance(answer, User) for answer in answers) == 1
    assert sum(isinstance(answer, Forbidden) for answer in answers) == 11


def test_a_refused_registration_leaves_its_invite_open(pool: Pool) -> None:
    invited(pool)
    with pytest.raises(Conflict):
        pool.account("ann", password_hash="x", invite_hash="h")
    assert pool.account("bob", password_hash="x", invite_hash="h")


def test_an_invite_to_a_team_never_lowers_a_role(pool: Pool) -> None:
    team, bob = pool.team("lab"), pool.user("bob")
    invited(pool, "1", team=team, role=Role.VIEWER)
    invited(pool, "2", team=team, role=Role.VIEWER)
    assert pool.write(accounts.join_team("1", pool.ann, pool.now(), 100)) == (team, Role.VIEWER)
    assert pool.read(teams.teams_of(pool.ann)) == {team: Role.OWNER}
    pool.write(accounts.join_team("2", bob, pool.now(), 100))
    assert pool.read(teams.teams_of(bob)) == {team: Role.VIEWER}
    with pytest.raises(Forbidden, match="used"):
        pool.write(accounts.join_team("2", bob, pool.now(), 100))


def test_an_invite_without_a_team_or_to_one_that_is_gone_lets_nobody_in(pool: Pool) -> None:
    invited(pool, "plain")
    with pytest.raises(Forbidden, match="new account"):
        pool.write(accounts.join_team("plain", pool.ann, pool.now(), 100))
    team = pool.team("lab")
    invited(pool, "gone", team=team, role=Role.OWNER)
    pool.write(teams.delete_team(team))
    with pytest.raises(Forbidden, match="deleted"):
        pool.write(accounts.join_team("gone", pool.ann, pool.now(), 100))


# ---- ways in


def test_a_wallet_belongs_to_one_account(pool: Pool) -> None:
    bob = pool.account("bob", wallet=WALLET)
    assert pool.write(accounts.link_wallet(bob, WALLET, pool.now())) is False
    with pytest.raises(Conflict, match="another account"):
        pool.write(accounts.link_wallet(pool.ann, WALLET, pool.now()))
    assert pool.write(accounts.link_wallet(pool.ann, OTHER, pool.now())) is True
    assert pool.write(accounts.unlink_wallet(pool.ann, WALLET, pool.now())) is False
    with pytest.raises(NotFound):
        pool.write(accounts.link_wallet(UserId(1), "0xcc", pool.now()))


@pytest.mark.parametrize(
    ("ways", "removal"),
    [
        ({"password_hash": "x"}, lambda user: accounts.set_password(user, None)),
        ({"wallet": WALLET}, lambda user: accounts.unlink_wallet(user, WALLET, Instant(1))),
    ],
)
def test_the_last_way_in_cannot_be_removed(pool: Pool, ways: dict, removal: object) -> None:
    bob = pool.account("bob", **ways)
    with pytest.raises(Conflict, match="last login method"):
        pool.write(removal(bob))
    pool.write(accounts.link_wallet(bob, OTHER, pool.now()))
    pool.write(removal(bob))
    assert pool.read(accounts.user_by_wallet(OTHER)).user.id == bob
    with pytest.raises(Conflict, match="last login method"):
        pool.write(accounts.unlink_wallet(bob, OTHER, pool.now()))


def test_two_removals_at_once_leave_a_way_in(pool: Pool, database: Database) -> None:
    for turn in range(5):
        mine = [f"0x{turn}{letter}" for letter in "abcd"]
        bob = pool.account(f"bob{turn}", wallet=mine[0])
        for address in mine[1:]:
            pool.write(accounts.link_wallet(bob, address, pool.now()))
        answers = race(
            database, [accounts.unlink_wallet(bob, address, Instant(1)) for address in mine]
        )
        assert sum(answer is True for answer in answers) == 3
        assert len(pool.read(accounts.wallets_of(bob))) == 1


def test_one_wallet_at_most_is_paid(pool: Pool) -> None:
    bob = pool.account("bob", wallet=WALLET)
    pool.write(accounts.link_wallet(bob, OTHER, pool.now()))
    assert pool.read(accounts.payout_wallet(bob)) == WALLET
    assert pool.write(accounts.set_payout_wallet(bob, OTHER, pool.now())) is True
    assert [w.payout for w in pool.read(accounts.wallets_of(bob))] == [False, True]
    assert pool.write(accounts.set_payout_wallet(pool.ann, OTHER, pool.now())) is False
    assert pool.write(accounts.set_payout_wallet(bob, None, pool.now())) is True
    assert pool.read(accounts.payout_wallet(bob)) is None


def test_a_password_is_rehashed_only_while_it_is_the_same(pool: Pool) -> None:
    bob = pool.account("bob", password_hash="old")
    assert pool.write(accounts.rehash_password(bob, "old", "newer")) is True
    assert pool.write(accounts.rehash_password(bob, "old", "newest")) is False
    pool.write(accounts.set_password(bob, "changed"))
    assert pool.read(accounts.account(bob)).password_hash == "changed"


# ---- operators


def test_users_are_listed_by_id(pool: Pool) -> None:
    made = [pool.ann, *(pool.user(f"u{i}") for i in range(4))]
    first = pool.read(accounts.users(UserId(0), 3))
    rest = pool.read(accounts.users(first[-1].user.id, 3))
    assert [each.user.id for each in (*first, *rest)] == made


def test_the_last_operator_stays_one(pool: Pool) -> None:
    operator = frozenset({Permission.OPERATOR})
    assert pool.write(accounts.set_permissions(pool.ann, operator)) is True
    bob = pool.user("bob")
    with pytest.raises(Conflict, match="last operator"):
        pool.write(accounts.set_permissions(pool.ann, frozenset()))
    with pytest.raises(Conflict, match="last operator"):
        pool.write(accounts.set_disabled(pool.ann, True, pool.now()))
    pool.write(accounts.set_permissions(bob, operator))
    assert pool.write(accounts.set_disabled(pool.ann, True, pool.now())) is True
    with pytest.raises(Conflict, match="last operator"):
        pool.write(accounts.set_permissions(bob, frozenset()))
    assert pool.write(accounts.set_permissions(UserId(1), operator)) is False


def test_two_operators_who_demote_each_other_at_once_do_not_both_succeed(
    pool: Pool, database: Database
) -> None:
    operator, none = frozenset({Permission.OPERATOR}), frozenset()
    bob = pool.user("bob")
    for _ in range(5):
        for user in (pool.ann, bob):
            pool.write(accounts.set_permissions(user, operator))
        answers = race(
            database, [accounts.set_permissions(user, none) for user in (pool.ann, bob)], stores=2
        )
        assert sorted(map(type, answers), key=str) == [bool, Conflict]


def test_who_is_disabled_is_signed_out_and_their_keys_sleep(pool: Pool) -> None:
    bob = pool.user("bob")
    held = opened_session(pool, bob)
    pool.write(users.add_key(1, bob, "k", "hashed", pool.now()))
    pool.write(accounts.set_disabled(bob, True, pool.now()))
    assert pool.read(accounts.account(bob)).disabled
    assert pool.read(sessions.session(held.id)).ended_why == "disabled"
    assert pool.read(users.user_by_key("hashed")) is None
    assert pool.read(users.caller(bob)) is None
    pool.write(accounts.set_disabled(bob, False, pool.now()))
    assert pool.read(users.user_by_key("hashed")).id == bob
    assert pool.read(sessions.session(held.id)).ended_at is not None


# ---- nonces


def test_a_nonce_is_taken_once_and_in_time(pool: Pool) -> None:
    at = pool.now()
    pool.write(accounts.put_nonce("n", "link", Instant(at + 10)))
    assert pool.write(accounts.take_nonce("m", "link", at)) is False
    assert pool.write(accounts.take_nonce("n", "sign_in", at)) is False
    assert pool.write(accounts.take_nonce("n", "link", at)) is True
    assert pool.write(accounts.take_nonce("n", "link", at)) is False
    pool.write(accounts.put_nonce("late", "link", at))
    assert pool.write(accounts.take_nonce("late", "link", at)) is False


def test_of_many_who_take_a_nonce_at_once_one_has_it(pool: Pool, database: Database) -> None:
    at = pool.now()
    pool.write(accounts.put_nonce("n", "link", Instant(at + 10)))
    answers = race(database, [accounts.take_nonce("n", "link", at) for _ in range(20)])
    assert sorted(answers) == [False] * 19 + [True]


def test_old_nonces_are_forgotten(pool: Pool) -> None:
    for number in range(5):
        pool.write(accounts.put_nonce(str(number), "link", Instant(number)))
    assert pool.write(accounts.forget_nonces(Instant(3), 2)) == 2
    assert pool.write(accounts.forget_nonces(Instant(3), 10)) == 1
    assert pool.write(accounts.take_nonce("4", "link", Instant(3))) is True
