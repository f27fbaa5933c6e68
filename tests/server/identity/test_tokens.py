"""Access tokens: what we issue we take, and nothing else, whoever made it and however it is spelt."""

from __future__ import annotations

import jwt
import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
from hypothesis import given
from hypothesis import strategies as st

from gpool.core.errors import Invalid
from gpool.core.ids import encode
from gpool.core.model import SECOND, Instant
from gpool.server.identity.access_tokens import (
    LIFE_S,
    SKEW_S,
    Claims,
    KeySet,
    RejectedToken,
    RejectionReason,
    TokenAudience,
    TokenGrant,
    TokenKey,
    TokenReader,
    TokenType,
    issue,
    new_key,
    verify,
)
from tests.server.identity.forged_tokens import GRANTS, GROUPS, NODE_KEY, bench, forgeries, rotated

PLACE = TokenAudience("https://pool.example", "gpool")
NOW = Instant(1_800_000_000 * SECOND)
BENCH = bench(PLACE, NOW)
FORGED = forgeries(BENCH)
JTI = "jti-0123456789abcdef"


def later(seconds: float) -> Instant:
    return Instant(NOW + int(seconds * SECOND))


@pytest.mark.parametrize("type_", list(TokenType))
def test_what_we_issue_we_take(type_: TokenType) -> None:
    claims = verify(BENCH.token(type_), BENCH.keys, PLACE, type_, NOW)
    assert isinstance(claims, Claims)
    assert (claims.type, claims.subject, claims.id) == (type_, GRANTS[type_].subject, JTI)
    assert (claims.session, claims.key) == (GRANTS[type_].session, GRANTS[type_].key)


def test_there_are_at_least_sixty_kinds_of_forgery_and_all_differ() -> None:
    assert len(FORGED) >= 60
    assert len({*FORGED.values(), BENCH.token()}) == len(FORGED) + 1


@pytest.mark.parametrize("name", list(FORGED))
def test_no_forgery_is_taken(name: str) -> None:
    assert isinstance(verify(FORGED[name], BENCH.keys, PLACE, TokenType.USER, NOW), RejectedToken)


@pytest.mark.parametrize("name", [n for n in FORGED if not n.startswith("types")])
def test_no_forgery_is_taken_for_a_nodes_token_either(name: str) -> None:
    assert isinstance(verify(FORGED[name], BENCH.keys, PLACE, TokenType.NODE, NOW), RejectedToken)


@pytest.mark.parametrize("name", list(FORGED))
def test_the_control_of_its_group_takes_every_forgery(name: str) -> None:
    """Each careless verifier is fooled, so the forgeries are worth refusing."""
    careless = GROUPS[name.partition(":")[0]][1]
    assert careless(FORGED[name], BENCH)


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("algorithm: alg none", RejectionReason.HEADER),
        ("header keys: jwk in the header", RejectionReason.HEADER),
        ("header keys: kid of the forger's key", RejectionReason.KEY),
        ("header keys: another server's key under our kid", RejectionReason.SIGNATURE),
        ("signatures: signed by a key long retired", RejectionReason.KEY),
        ("signatures: signature shifted by the group's order", RejectionReason.SIGNATURE),
        ("claims: another audience", RejectionReason.PLACE),
        ("claims: expires now", RejectionReason.TIME),
        ("claims: lives for a year", RejectionReason.TIME),
        ("claims: expires true", RejectionReason.CLAIMS),
        ("claims: type of another token", RejectionReason.TYPE),
        ("claims: a claim of the forger's", RejectionReason.CLAIMS),
        ("spelling: subject twice", RejectionReason.CLAIMS),
        ("spelling: alg twice", RejectionReason.HEADER),
        ("spelling: spare bits set in the signature", RejectionReason.FORM),
        ("spelling: a long one", RejectionReason.FORM),
        ("types: a node's own token", RejectionReason.TYPE),
    ],
)
def test_a_forgery_is_refused_for_its_own_fault(name: str, why: RejectionReason) -> None:
    """Otherwise a token broken in two places would prove nothing about either."""
    found = verify(FORGED[name], BENCH.keys, PLACE, TokenType.USER, NOW)
    assert isinstance(found, RejectedToken)
    assert found.why is why


@given(st.integers(0, 10_000), st.integers(1, 127))
def test_no_token_with_a_letter_changed_is_ever_taken(place: int, turn: int) -> None:
    genuine = BENCH.token()
    at = place % len(genuine)
    changed = genuine[:at] + chr(ord(genuine[at]) ^ turn) + genuine[at + 1 :]
    assert isinstance(verify(changed, BENCH.keys, PLACE, TokenType.USER, NOW), RejectedToken)


@given(st.text(max_size=300))
def test_any_text_has_an_answer(text: str) -> None:
    assert isinstance(verify(text, BENCH.keys, PLACE, TokenType.USER, NOW), RejectedToken)


def test_pyjwt_reads_our_tokens_as_we_do() -> None:
    public = BENCH.keys.verifier(BENCH.kid, NOW)
    assert public is not None
    read = jwt.decode(
        BENCH.token(),
        Ed25519PublicKey.from_public_bytes(public),
        algorithms=["EdDSA"],
        audience=PLACE.audience,
        issuer=PLACE.issuer,
        options={"verify_exp": False, "verify_iat": False},
    )
    assert (read["sub"], read["jti"], read["type"]) == (encode("user", 7), JTI, "user-access")
    assert jwt.get_unverified_header(BENCH.token())["kid"] == BENCH.kid


# ---- remembering


def test_a_remembered_token_is_still_refused_for_its_time_its_type_and_its_key() -> None:
    reader = TokenReader(BENCH.keys, PLACE)
    token, end = BENCH.token(), LIFE_S[TokenType.USER]
    for _ in range(2):
        assert isinstance(reader.read(token, TokenType.USER, NOW), Claims)
        assert isinstance(reader.read(token, TokenType.NODE, NOW), RejectedToken)
        assert isinstance(reader.read(token, TokenType.USER, later(end)), RejectedToken)
    reader.use(KeySet((new_key(b"9" * 32, NOW),)))
    assert isinstance(reader.read(token, TokenType.USER, NOW), RejectedToken)


def test_having_taken_a_genuine_token_no_forgery_of_it_is_taken() -> None:
    reader = TokenReader(BENCH.keys, PLACE, most=2)
    for forged in FORGED.values():
        assert isinstance(reader.read(BENCH.token(), TokenType.USER, NOW), Claims)
        assert isinstance(reader.read(forged, TokenType.USER, NOW), RejectedToken)


# ---- time


def test_a_token_is_good_until_the_second_it_expires() -> None:
    token, life = BENCH.token(), LIFE_S[TokenType.USER]
    for seconds, good in [(0, True), (life - 1, True), (life, False), (life + 1, False)]:
        found = verify(token, BENCH.keys, PLACE, TokenType.USER, later(seconds))
        assert isinstance(found, Claims) is good


def test_a_replica_whose_clock_is_a_little_behind_takes_it_and_one_far_behind_does_not() -> None:
    token = BENCH.token()
    for behind, good in [(SKEW_S, True), (SKEW_S + 2, False)]:
        found = verify(token, BENCH.keys, PLACE, TokenType.USER, later(-behind))
        assert isinstance(found, Claims) is good


# ---- keys


def test_a_new_key_is_known_before_it_signs_and_the_old_ones_tokens_live_out_their_time() -> None:
    keys = KeySet((new_key(b"1" * 32, NOW),))
    old = issue(keys, PLACE, GRANTS[TokenType.USER], JTI, NOW)
    both = rotated(keys, b"2" * 32, later(10))
    assert both.signer(later(9)).kid == keys.keys[0].kid
    assert both.signer(later(10)).kid == both.keys[1].kid
    last_old = issue(both, PLACE, GRANTS[TokenType.USER], JTI, later(9))
    end = LIFE_S[TokenType.USER]
    assert isinstance(verify(old, both, PLACE, TokenType.USER, later(end - 1)), Claims)
    assert isinstance(verify(last_old, both, PLACE, TokenType.USER, later(9 + end - 1)), Claims)
    assert both.verifier(keys.keys[0].kid, later(10 + end + SKEW_S)) is None


@given(st.lists(st.integers(0, 2000), max_size=8))
def test_however_keys_rotate_an_unexpired_token_is_always_taken(gaps: list[int]) -> None:
    now = NOW
    keys = KeySet((new_key(b"0" * 32, now),))
    held: list[tuple[Instant, str]] = []
    for turn, gap in enumerate(gaps):
        held.append((now, issue(keys, PLACE, GRANTS[TokenType.USER], JTI, now)))
        now = Instant(now + gap * SECOND)
        keys = rotated(keys, bytes([turn + 1]) * 32, Instant(now + 10 * SECOND))
        for issued, token in held:
            alive = now // SECOND < issued // SECOND + LIFE_S[TokenType.USER]
            found = verify(token, keys, PLACE, TokenType.USER, now)
            assert isinstance(found, Claims) is alive


def test_the_public_keys_are_published_without_the_private_ones_and_pyjwt_finds_its_key() -> None:
    page = {"keys": BENCH.keys.jwks(NOW)}
    assert "d" not in {name for key in page["keys"] for name in key}
    found = jwt.PyJWKSet.from_dict(page)[BENCH.kid]
    read = jwt.decode(
        BENCH.token(),
        found.key,
        algorithms=["EdDSA"],
        audience=PLACE.audience,
        options={"verify_exp": False, "verify_iat": False},
    )
    assert read["sub"] == encode("user", 7)


def test_a_private_key_never_shows_when_a_key_is_printed() -> None:
    key: TokenKey = BENCH.keys.signer(NOW)
    assert key.private is not None
    assert repr(key.private) not in repr(BENCH.keys)


@pytest.mark.parametrize(
    "grant",
    [
        TokenGrant(TokenType.USER, encode("node", 1), session="s"),
        TokenGrant(TokenType.USER, encode("user", 1)),
        TokenGrant(TokenType.USER, encode("user", 1), session="s", key=NODE_KEY),
        TokenGrant(TokenType.NODE, encode("node", 1)),
        TokenGrant(TokenType.NODE, encode("node", 1), key="short"),
    ],
)
def test_we_never_issue_what_we_would_not_take(grant: TokenGrant) -> None:
    with pytest.raises(Invalid):
        issue(BENCH.keys, PLACE, grant, JTI, NOW)
