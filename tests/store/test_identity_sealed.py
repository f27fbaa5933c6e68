"""Data keys, task secrets, and going through every sealed field to seal it anew."""

from __future__ import annotations

from dataclasses import replace

import pytest

from gpool.core.errors import Conflict, Invalid
from gpool.core.ids import SpecId
from gpool.core.model import Instant
from gpool.server.store.operations.identity import sealed_fields, sessions
from gpool.server.store.operations.tasks.submissions import SubmittedTasks
from gpool.server.store.values import DataKey, SealedField
from tests.store.store_pool import COMMAND, Database, Pool, race, submit_one
from tests.store.test_identity_sessions import begun, key

OLD, NEW = b"old-key-", b"new-key-"


def boxed(text: str, under: bytes = OLD) -> bytes:
    """Shaped as the envelope's: a version, the key's id, and what nobody here can read."""
    return b"\x01" + under + text.encode()


def test_data_keys_come_oldest_first_and_are_retired_and_rewrapped(pool: Pool) -> None:
    first, second = DataKey(OLD, b"wrapped", Instant(1)), DataKey(NEW, b"w2", Instant(2))
    for each in (second, first):
        pool.write(sealed_fields.put_data_key(each))
    assert pool.read(sealed_fields.data_keys()) == (first, second)
    assert "wrapped" not in repr(first).replace("wrapped=", "")
    assert pool.write(sealed_fields.rewrap_data_key(OLD, b"stale", b"x")) is False
    assert pool.write(sealed_fields.rewrap_data_key(OLD, b"wrapped", b"again")) is True
    assert pool.write(sealed_fields.retire_data_key(OLD, Instant(5))) is True
    assert pool.write(sealed_fields.retire_data_key(OLD, Instant(6))) is False
    assert pool.read(sealed_fields.data_keys())[0] == DataKey(OLD, b"again", Instant(1), Instant(5))


def test_a_data_key_that_a_field_needs_is_never_forgotten(pool: Pool) -> None:
    pool.write(sealed_fields.put_data_key(DataKey(OLD, b"w", Instant(1))))
    assert pool.write(sealed_fields.forget_data_key(NEW)) is False
    with pytest.raises(Conflict, match="retire"):
        pool.write(sealed_fields.forget_data_key(OLD))
    pool.write(sealed_fields.retire_data_key(OLD, Instant(2)))
    pool.write(sealed_fields.put_secrets(SpecId(1), [("A", boxed("x"))]))
    with pytest.raises(Conflict, match="task_secrets"):
        pool.write(sealed_fields.forget_data_key(OLD))
    (field,) = pool.read(sealed_fields.sealed_fields(None, 10))
    pool.write(sealed_fields.replace_sealed([(field, boxed("x", NEW))]))
    assert pool.write(sealed_fields.forget_data_key(OLD)) is True
    assert pool.read(sealed_fields.data_keys()) == ()


def test_secrets_travel_with_their_submission(pool: Pool) -> None:
    given = (("A", boxed("1")), ("B/C", boxed("2")))
    done = pool.try_submit(secrets=given)
    plain = pool.try_submit()
    assert isinstance(done, SubmittedTasks)
    assert pool.read(sealed_fields.secrets_of([done.spec_id, plain.spec_id])) == {
        done.spec_id: given
    }
    assert pool.view(done.tasks[0].id).spec == COMMAND
    with pytest.raises(Conflict, match="already"):
        pool.write(sealed_fields.put_secrets(done.spec_id, given))


def test_specs_with_other_secrets_are_never_one(pool: Pool) -> None:
    given = (("A", boxed("1")),)
    made = [pool.try_submit(secrets=given) for _ in range(2)]
    made += [pool.try_submit(secrets=given, secrets_mark="m") for _ in range(2)]
    made += [pool.try_submit(secrets=(("A", boxed("2")),), secrets_mark="n"), pool.try_submit()]
    ids = [each.spec_id for each in made]
    assert ids[2] == ids[3]
    assert len(set(ids)) == 5
    assert pool.read(sealed_fields.secrets_of([ids[4]])) == {ids[4]: (("A", boxed("2")),)}


def test_submissions_of_one_spec_with_equal_secrets_at_once_keep_one_set(
    pool: Pool, database: Database
) -> None:
    made = [
        submit_one(pool.submission(secrets=(("A", boxed(str(i))),), secrets_mark="m"))
        for i in range(12)
    ]
    answers = race(database, made)
    (spec,) = {answer.spec_id for answer in answers}
    assert len(pool.read(sealed_fields.secrets_of([spec]))[spec]) == 1


def many_fields(pool: Pool) -> set[tuple[str, str]]:
    places = set()
    for number in range(7):
        row, _ = begun(pool)
        pool.write(sessions.open_session(replace(row, seed_sealed=boxed(row.id))))
        places.add(("sessions", row.id))
        pool.write(
            sealed_fields.put_secrets(SpecId(number + 1), [(n, boxed(n)) for n in ("X/Y", "Z")])
        )
        places |= {("task_secrets", f"{number + 1}/{name}") for name in ("X/Y", "Z")}
    for kid in ("one", "two"):
        known = {each.kid for each in pool.read(sessions.signing_keys())}
        pool.write(sessions.put_signing_key(replace(key(kid, 1), sealed=boxed(kid)), known))
        places.add(("signing_keys", kid))
    return places


@pytest.mark.parametrize("page", [1, 4, 100])
def test_every_sealed_field_is_seen_once_and_sealed_anew(pool: Pool, page: int) -> None:
    places = many_fields(pool)
    seen: list[SealedField] = []
    while found := pool.read(sealed_fields.sealed_fields(seen[-1] if seen else None, page)):
        assert len(found) <= page
        changes = [(field, boxed(field.row, NEW)) for field in found]
        assert pool.write(sealed_fields.replace_sealed(changes)) == len(found)
        assert pool.write(sealed_fields.replace_sealed(changes)) == 0
        seen += found
    assert sorted((field.table, field.row) for field in seen) == sorted(places)
    again = pool.read(sealed_fields.sealed_fields(None, 100))
    assert all(field.sealed == boxed(field.row, NEW) for field in again)
    assert all("old-key" not in repr(field) for field in seen)


def test_a_field_that_changed_meanwhile_is_left_as_it_is(pool: Pool) -> None:
    pool.write(sealed_fields.put_secrets(SpecId(1), [("A", boxed("a")), ("B", boxed("b"))]))
    one, two = pool.read(sealed_fields.sealed_fields(None, 10))
    pool.write(sealed_fields.replace_sealed([(one, boxed("newer"))]))
    assert (
        pool.write(sealed_fields.replace_sealed([(one, boxed("late")), (two, boxed("late"))])) == 1
    )
    assert [f.sealed for f in pool.read(sealed_fields.sealed_fields(None, 10))] == [
        boxed("newer"),
        boxed("late"),
    ]
    assert pool.write(sealed_fields.replace_sealed([])) == 0


def test_a_row_that_cannot_be_one_is_refused(pool: Pool) -> None:
    odd = SealedField("task_secrets", "no number", "sealed", b"x")
    with pytest.raises(Invalid, match="no row"):
        pool.write(sealed_fields.replace_sealed([(odd, b"y")]))


def test_of_two_who_seal_a_field_anew_at_once_one_does(pool: Pool, database: Database) -> None:
    pool.write(sealed_fields.put_secrets(SpecId(1), [("A", boxed("a"))]))
    (field,) = pool.read(sealed_fields.sealed_fields(None, 10))
    changes = [sealed_fields.replace_sealed([(field, boxed(f"{i}", NEW))]) for i in range(8)]
    assert sorted(race(database, changes)) == [0] * 7 + [1]
