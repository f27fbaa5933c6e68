"""Secrets at rest: opened where they were sealed and nowhere else, whatever is swapped, changed or rotated."""

from __future__ import annotations

import base64
import random
import stat
import threading
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from hypothesis import given
from hypothesis import strategies as st

from gpool.core.errors import InternalFault, Invalid
from gpool.core.model import SECOND, Instant, Span
from gpool.server.identity.envelope import (
    HEAD_BYTES,
    NONCE_BYTES,
    OVERHEAD_BYTES,
    Envelope,
    FieldLocation,
    WrappedKey,
    add_master_to_file,
    drop_old_masters_from_file,
    master,
    masters_from_command,
    masters_from_file,
    masters_from_text,
    rewrapped,
)

NOW = Instant(1_800_000_000 * SECOND)
ONE, TWO = master(b"1" * 32), master(b"2" * 32)
HERE = FieldLocation("webhooks", "7", "secret")


def envelope() -> Envelope:
    made = Envelope([ONE])
    made.begin_key(NOW)
    return made


@given(st.text(), st.text(), st.text(), st.binary(max_size=200))
def test_what_is_sealed_always_opens_where_it_was_sealed(
    table: str, row: str, column: str, plain: bytes
) -> None:
    try:
        place = FieldLocation(table, row, column)
        "".join((table, row, column)).encode()
    except UnicodeEncodeError:
        return
    sealing = envelope()
    sealed = sealing.seal(place, plain)
    assert sealing.open(place, sealed) == plain
    assert len(sealed) == len(plain) + OVERHEAD_BYTES


def test_a_thousand_swapped_fields_never_open_and_without_binding_all_would() -> None:
    dice = random.Random(1)
    sealing = Envelope([ONE])
    key = sealing.begin_key(NOW)
    raw = AESGCM(ONE.key).decrypt(
        key.wrapped[HEAD_BYTES : HEAD_BYTES + NONCE_BYTES],
        key.wrapped[HEAD_BYTES + NONCE_BYTES :],
        b"gpool data key\0" + key.wrapped[:HEAD_BYTES] + key.id,
    )
    naive, nonce = AESGCM(raw), bytes(NONCE_BYTES)
    opened = opened_naively = 0
    for turn in range(1000):
        places = [
            FieldLocation(f"t{dice.randrange(3)}", str(dice.randrange(9)), f"c{dice.randrange(3)}")
            for _ in range(2)
        ]
        if places[0] == places[1]:
            places[1] = FieldLocation("other", "0", "c0")
        sealed = sealing.seal(places[0], b"secret %d" % turn)
        try:
            sealing.open(places[1], sealed)
            opened += 1
        except InternalFault:
            pass
        unbound = naive.encrypt(nonce, b"secret %d" % turn, None)
        opened_naively += naive.decrypt(nonce, unbound, None) == b"secret %d" % turn
    assert (opened, opened_naively) == (0, 1000)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (FieldLocation("ab", "c", "d"), FieldLocation("a", "bc", "d")),
        (FieldLocation("a", "b\0c", "d"), FieldLocation("a\0b", "c", "d")),
        (FieldLocation("", "a", ""), FieldLocation("a", "", "")),
        (FieldLocation("a", "1", "c"), FieldLocation("a", "01", "c")),
        (FieldLocation("a", "1", "c"), FieldLocation("A", "1", "c")),
    ],
)
def test_places_that_read_alike_when_joined_are_still_different(
    one: FieldLocation, other: FieldLocation
) -> None:
    sealing = envelope()
    with pytest.raises(InternalFault):
        sealing.open(other, sealing.seal(one, b"x"))


@given(st.integers(0, 10_000), st.integers(1, 255))
def test_a_field_with_any_byte_changed_never_opens(place: int, turn: int) -> None:
    sealing = envelope()
    sealed = bytearray(sealing.seal(HERE, b"the secret of the webhook"))
    sealed[place % len(sealed)] ^= turn
    with pytest.raises(InternalFault, match=r"^a sealed field of webhooks\.secret does not open$"):
        sealing.open(HERE, bytes(sealed))


@pytest.mark.parametrize("cut", [0, 1, 8, 9, 20, 36, 37, 40])
def test_a_field_cut_short_never_opens(cut: int) -> None:
    sealing = envelope()
    with pytest.raises(InternalFault):
        sealing.open(HERE, sealing.seal(HERE, b"four and more")[:cut])


def test_the_same_secret_is_never_sealed_to_the_same_bytes() -> None:
    sealing = envelope()
    sealed = {sealing.seal(HERE, b"same") for _ in range(2000)}
    assert len(sealed) == 2000
    assert len({each[HEAD_BYTES : HEAD_BYTES + NONCE_BYTES] for each in sealed}) == 2000


def test_the_plain_bytes_never_show() -> None:
    sealed = envelope().seal(HERE, b"a planted secret")
    assert b"planted" not in sealed
    assert repr(ONE.key) not in repr(ONE)


# ---- keys


def test_replicas_seal_under_keys_of_their_own_and_open_each_others_fields() -> None:
    one, two = Envelope([ONE]), Envelope([ONE])
    keys = [one.begin_key(NOW), two.begin_key(NOW)]
    sealed = one.seal(HERE, b"x")
    assert not two.knows(sealed)
    with pytest.raises(InternalFault):
        two.open(HERE, sealed)
    two.adopt(keys)
    assert two.knows(sealed)
    assert two.open(HERE, sealed) == b"x"
    assert keys[0].id != keys[1].id


def test_nothing_is_sealed_before_there_is_a_key() -> None:
    with pytest.raises(InternalFault, match="begin_key"):
        Envelope([ONE]).seal(HERE, b"x")


def test_a_key_wears_out_with_time() -> None:
    day = Span(86_400 * SECOND)
    sealing = Envelope([ONE])
    assert sealing.is_worn(NOW, day)
    sealing.begin_key(NOW)
    assert not sealing.is_worn(NOW, day)
    assert sealing.is_worn(Instant(NOW + day), day)


def test_a_field_moves_to_a_new_data_key_once_and_the_old_key_is_needed_no_more() -> None:
    sealing = Envelope([ONE])
    sealing.begin_key(NOW)
    before = sealing.seal(HERE, b"x")
    assert sealing.resealed(HERE, before) is None
    new = sealing.begin_key(NOW)
    after = sealing.resealed(HERE, before)
    assert after is not None
    assert sealing.resealed(HERE, after) is None
    assert Envelope([ONE], [new]).open(HERE, after) == b"x"
    with pytest.raises(InternalFault):
        sealing.resealed(FieldLocation("webhooks", "8", "secret"), before)


def test_a_masters_rotation_keeps_every_field_and_the_old_master_is_needed_no_more() -> None:
    sealing = Envelope([ONE])
    keys = [sealing.begin_key(NOW)]
    sealed = sealing.seal(HERE, b"x")
    moved = rewrapped([TWO, ONE], keys)
    assert [key.id for key in moved] == [key.id for key in keys]
    assert rewrapped([TWO, ONE], moved) == []
    assert Envelope([TWO], moved).open(HERE, sealed) == b"x"
    with pytest.raises(Invalid, match="wrapped by the master key"):
        Envelope([TWO], keys)


def test_wrapped_keys_that_are_swapped_or_changed_in_the_store_never_open() -> None:
    sealing = Envelope([ONE])
    one, two = sealing.begin_key(NOW), sealing.begin_key(NOW)
    bent = bytearray(one.wrapped)
    bent[-1] ^= 1
    for key in (
        WrappedKey(one.id, two.wrapped, NOW),
        WrappedKey(one.id, bytes(bent), NOW),
        WrappedKey(one.id, one.wrapped[:-20], NOW),
    ):
        with pytest.raises(InternalFault, match="changed in the store"):
            Envelope([ONE], [key])


# ---- where master keys come from


def test_a_file_is_made_once_for_its_owner_only_and_read_again(tmp_path: Path) -> None:
    path = tmp_path / "keys" / "master.key"
    first = masters_from_file(path)
    assert len(first) == 1
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert masters_from_file(path) == first
    assert [each.name for each in path.parent.iterdir()] == ["master.key"]


def test_two_processes_that_start_at_once_end_with_one_key(tmp_path: Path) -> None:
    found = []
    barrier = threading.Barrier(8)

    def start() -> None:
        barrier.wait()
        found.append(masters_from_file(tmp_path / "master.key"))

    threads = [threading.Thread(target=start) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 8
    assert len(set(found)) == 1


def test_a_file_others_can_read_is_refused_with_what_to_do(tmp_path: Path) -> None:
    path = tmp_path / "master.key"
    masters_from_file(path)
    path.chmod(0o640)
    with pytest.raises(Invalid, match=r"mode 0640.*chmod 600"):
        masters_from_file(path)


def test_a_master_in_a_file_is_rotated_in_two_halves(tmp_path: Path) -> None:
    path = tmp_path / "master.key"
    (old,) = masters_from_file(path)
    new, behind = add_master_to_file(path)
    assert behind == old != new
    assert drop_old_masters_from_file(path) == (new,)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


@pytest.mark.parametrize(
    "text",
    [
        "31" * 32,
        base64.b64encode(b"1" * 32).decode(),
        base64.urlsafe_b64encode(b"1" * 32).decode().rstrip("="),
        "\n " + "31" * 32 + "\n",
    ],
)
def test_a_key_is_read_in_the_usual_spellings(text: str) -> None:
    assert masters_from_text(text, "GPOOL_MASTER_KEY") == (ONE,)


@pytest.mark.parametrize("text", ["", " \n", "short", "31" * 31, "zz" * 32, "é" * 43])
def test_what_is_no_key_is_refused_without_being_repeated(text: str) -> None:
    with pytest.raises(Invalid) as caught:
        masters_from_text(text, "GPOOL_MASTER_KEY")
    assert "GPOOL_MASTER_KEY" in caught.value.detail
    assert not text.strip() or text not in caught.value.detail


def test_a_command_gives_the_key_or_says_why_not() -> None:
    give = ["sh", "-c", f"echo {'31' * 32}; echo {'32' * 32}"]  # Python itself starts slowly
    assert masters_from_command(give) == (ONE, TWO)
    fail = ["sh", "-c", "echo the vault is closed >&2; exit 1"]
    with pytest.raises(Invalid, match="exit 1: the vault is closed"):
        masters_from_command(fail)
    with pytest.raises(Invalid, match="printed no master key"):
        masters_from_command(["/nowhere/kms"])
    with pytest.raises(Invalid, match="the empty command"):
        masters_from_command([])
