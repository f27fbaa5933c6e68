"""Request bodies that are expensive to refuse: bounded before pydantic reads them, honest ones unchanged."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Annotated, Any, get_args, get_origin

import pytest
from annotated_types import MaxLen
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel, ValidationError

from gpool.core.errors import GpoolError, Invalid, TooLarge
from gpool.server.api.bodies import MAX_MEMBERS, UNSCANNED_BYTES, parsed, scanned
from gpool.server.api.routing import endpoints
from gpool.wire.documents import MAX_ANONYMOUS_BODY_BYTES, MAX_ENV, TaskRequest
from gpool.wire.nodes import NodeRequest
from tests.server.server_desk import Desk

MANY = 50_000


def numbered(form: str, count: int = MANY) -> str:
    return ",".join(form.replace("N", str(number)) for number in range(count))


HOSTILE = {
    "fields": '{"command":["true"],' + numbered('"xN":1') + "}",
    "fields after a wrong one": '{"command":5,' + numbered('"xN":1') + "}",
    "fields of an input": '{"inputs":[{' + numbered('"xN":1') + "}]}",
    "fields of a call": '{"calls":["",{' + numbered('"xN":1') + "}]}",
    "fields of a function": '{"function":{' + numbered('"xN":1') + "}}",
    "inputs": '{"inputs":[' + numbered('{"x":1}') + "]}",
    "environment": '{"command":["true"],"env":{' + numbered('"AN":""') + "}}",
    "escapes in the environment": r'{"env":{' + numbered(r'"AN\\":"\\"') + "}}",
    "secrets": '{"command":["true"],"secrets":{' + numbered('"AN":1') + "}}",
    "fields after a NaN": '{"name":NaN,' + numbered('"xN":1') + "}",
    "fields after an Infinity in an input": '{"inputs":[{"path":-Infinity,'
    + numbered('"xN":1')
    + "}]}",
    "fields of an environment spec after a NaN": '{"recipe":{"x":NaN,' + numbered('"xN":1') + "}}",
    "lists in a command": '{"command":[' + numbered("[]") + "]}",
    "members of an object in place of a list": '{"command":{' + numbered('"xN":1') + "}}",
    "members of a list in place of an object": '{"env":[' + numbered("[]") + "]}",
    "calls": '{"calls":[' + numbered("{}") + "]}",
}


@pytest.mark.parametrize("kind", HOSTILE)
def test_a_body_with_many_faults_is_refused_at_the_first(kind: str) -> None:
    raw = HOSTILE[kind].encode()
    with pytest.raises(Invalid) as refused:
        parsed(TaskRequest, raw)
    assert "more)" not in refused.value.detail
    errors = refused.value.members["errors"]
    assert isinstance(errors, list)
    assert len(errors) == 1


@pytest.mark.parametrize("kind", ["fields", "fields of an input", "secrets", "fields after a NaN"])
def test_pydantic_alone_makes_an_error_of_each(kind: str) -> None:
    """The control."""
    with pytest.raises(ValidationError) as refused:
        TaskRequest.model_validate_json(HOSTILE[kind])
    assert refused.value.error_count() >= MANY


def types_in(annotation: Any) -> Iterator[Any]:
    yield annotation
    for each in get_args(annotation):
        yield from types_in(each)


def is_limited(annotation: Any) -> bool:
    """Every list and mapping inside has a limit of members."""
    bare = [each for each in types_in(annotation) if get_origin(each) in (list, dict)]
    limited = [
        each
        for each in types_in(annotation)
        if any(
            isinstance(limit, MaxLen)
            for part in getattr(each, "__metadata__", ())
            for limit in (part, *getattr(part, "metadata", ()))
        )
        and get_origin(each.__origin__) in (list, dict)
    ]
    return len(bare) == len(limited)


def test_every_list_and_mapping_of_a_request_has_a_limit() -> None:
    bodies = {each.body for each in endpoints() if isinstance(each.body, type)}
    models = [each for each in bodies if issubclass(each, BaseModel)]
    assert len(models) > 20
    unlimited, seen = set(), set()
    while models:
        model = models.pop()
        seen.add(model)
        for name, field in model.model_fields.items():
            whole: Any = field.annotation
            if field.metadata:
                whole = Annotated[whole, *field.metadata]
            if not is_limited(whole):
                unlimited.add(f"{model.__name__}.{name}")
            inside = [
                each
                for each in types_in(whole)
                if isinstance(each, type) and issubclass(each, BaseModel)
            ]
            models += [each for each in inside if each not in seen]
    assert unlimited == set()


def test_a_body_of_more_members_than_any_document_has_is_refused_unread() -> None:
    raw = ('{"name":[' + "1," * (MAX_MEMBERS + 1) + "1]}").encode()
    with pytest.raises(TooLarge, match="members"):
        parsed(TaskRequest, raw)


def test_repeated_fields_are_read_once() -> None:
    raw = ("{" + '"name":"a",' * MANY + '"name":"b"}').encode()
    assert scanned(TaskRequest, raw) == b'{"name":"b"}'
    assert parsed(TaskRequest, raw).name == "b"


def test_an_object_in_place_of_a_text_is_refused_without_its_members() -> None:
    raw = ('{"name":{' + numbered('"xN":1') + "}}").encode()
    assert scanned(TaskRequest, raw) == b'{"name":{}}'
    with pytest.raises(Invalid, match="'name' must be text"):
        parsed(TaskRequest, raw)


def test_an_environment_as_large_as_allowed_is_taken() -> None:
    document = {"command": ["true"], "env": {f"A{n}": f'"{n}\\' for n in range(MAX_ENV)}}
    assert len(parsed(TaskRequest, json.dumps(document).encode()).env) == MAX_ENV
    document["env"] = {f"A{n}": "" for n in range(MAX_ENV + 1)}
    with pytest.raises(Invalid, match=f"'env' must have at most {MAX_ENV} members"):
        parsed(TaskRequest, json.dumps(document).encode())


@pytest.mark.parametrize(
    ("raw", "says"),
    [
        (b"", "the body is not JSON"),
        (b'{"name":', "the body is not JSON"),
        (b"\xff", "the body is not JSON"),
        (b'{"name":"\xff"}', "the body is not JSON"),
        (b'{"cpus":NaN}', "the body is not JSON"),
        (b"[1]", "the body must be an object"),
        (b'"x"', "the body must be an object"),
    ],
)
def test_what_is_no_document_is_refused(raw: bytes, says: str) -> None:
    with pytest.raises(Invalid, match=says):
        parsed(TaskRequest, raw + b" " * (UNSCANNED_BYTES + 1))


texts = st.text(max_size=20)
documents = st.fixed_dictionaries(
    {},
    optional={
        "name": texts.filter(bool),
        "command": st.lists(texts, min_size=1, max_size=3),
        "env": st.dictionaries(texts, texts, max_size=5),
        "calls": st.lists(texts | st.just({"payload": "x"}), max_size=3),
        "inputs": st.lists(
            st.fixed_dictionaries(
                {"path": texts, "sha256": st.just("a" * 64), "size_bytes": st.integers(0, 9)}
            ),
            max_size=3,
        ),
        "function": st.just({"sha256": "a" * 64, "python": "3.11"}),
        "recipe": st.just({"packages": ["numpy"]}),
        "gpu": st.none() | st.integers(0, 4) | texts,
        "vram": st.just("x" * UNSCANNED_BYTES),
    },
)


@given(documents, st.booleans())
def test_an_honest_document_is_the_same_after_the_scan(
    document: dict[str, Any], pretty: bool
) -> None:
    raw = json.dumps(document, indent=4 if pretty else None).encode()
    assert _outcome(scanned(TaskRequest, raw)) == _outcome(raw)


def _outcome(raw: bytes) -> object:
    try:
        return TaskRequest.model_validate_json(raw)
    except ValidationError as error:
        return [each["type"] for each in error.errors()]


def test_a_machine_with_a_thousand_gpus_is_taken() -> None:
    gpus = [{"index": n, "uuid": f"GPU-{n}", "model": "L4", "memory_bytes": 1} for n in range(1024)]
    raw = json.dumps({"name": "big", "gpus": gpus}).encode()
    assert len(parsed(NodeRequest, raw).gpus) == 1024
    gpus[1000]["color"] = "red"
    with pytest.raises(GpoolError, match=r"'gpus\.1000\.color' is not a field"):
        parsed(NodeRequest, json.dumps({"name": "big", "gpus": gpus}).encode())


@pytest.mark.anyio
@pytest.mark.parametrize("headers", [{}, {"authorization": "x"}])
async def test_without_a_valid_credential_only_small_bodies_are_read(
    desk: Desk, headers: dict[str, str]
) -> None:
    large = {"name": "ann", "password": "x" * MAX_ANONYMOUS_BODY_BYTES}
    answer = await desk.bare.post("/v1/auth/password", json=large, headers=headers)
    assert answer.status_code == 413
    assert str(MAX_ANONYMOUS_BODY_BYTES) in answer.json()["detail"]


@pytest.mark.anyio
async def test_with_a_valid_one_a_large_body_is_read_in_a_thread(desk: Desk) -> None:
    """The control."""
    names = [f"output-{number:0190}" for number in range(1000)]
    answer = await desk.post("/v1/tasks", {"command": ["true"], "outputs": names})
    assert answer.status_code == 202, answer.text
    assert not desk.server.turns.parsing.locked()
    assert len(desk.server.turns.large_bodies) == 0
