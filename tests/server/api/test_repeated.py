"""Requests recognised by the bytes before their calls: the same document and spec as the parser's, or none."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpool.core.errors import Invalid
from gpool.server.actions.tasks.repeated import MOST_KNOWN, RepeatedRequests, WantedTasks, head_of
from gpool.server.actions.tasks.specs import spec_of
from gpool.server.api.bodies import parsed
from gpool.wire.documents import TaskRequest

FUNCTION = '"function":{"sha256":"%s","python":"3.11"}' % ("a" * 64)


def known(*bodies: str) -> RepeatedRequests:
    """Keep what the route keeps of these bodies."""
    requests = RepeatedRequests()
    for body in bodies:
        raw = body.encode()
        request = parsed(TaskRequest, raw)
        requests.keep(WantedTasks(request, None, head_of(raw)), spec_of(request))
    return requests


def test_a_request_with_other_calls_is_recognised() -> None:
    requests = known(f'{{"retries":2,{FUNCTION},"calls":["gAR9Lg=="]}}')
    raw = b'{"retries":2,%s,"calls":["AAAA", "BBBB"]}' % FUNCTION.encode()
    found = requests.find(raw)
    assert found is not None
    assert found.request == parsed(TaskRequest, raw)
    assert found.spec == spec_of(found.request)
    assert requests.find(raw.replace(b"2", b"3", 1)) is None, "another head"


@pytest.mark.parametrize(
    "body",
    [
        f'{{{FUNCTION},"calls":["AAAA"],"outputs":[]}}',  # members after the calls
        f'{{{FUNCTION},"calls":["AAAA"],"retries":3,"preload":["a"]}}',
        f'{{{FUNCTION},"calls":[{{"payload":"AAAA"}}]}}',
        f'{{{FUNCTION},"secrets":{{"A":"b"}},"calls":["AAAA"]}}',
        f'{{{FUNCTION},"by":"2030-01-01T00:00:00Z","calls":["AAAA"]}}',
        '{{{},"name":"{}","calls":["AAAA"]}}'.format(FUNCTION, "x" * 190) + " " * 70_000,
    ],
)
def test_a_request_that_cannot_be_told_by_its_head_is_not_kept(body: str) -> None:
    assert not known(body)


MEMBERS = st.sampled_from(
    [
        FUNCTION,
        '"name":"a,"',
        '"name":"\\"calls\\":["',
        '"name":"{"',
        '"calls":null',
        '"calls": ["CCCC"]',
        '"calls":["DDDD"]',
        '"env":{"A":"b"}',
        '"env":{"calls":"["}',
        '"x\\"calls":["AAAA"]',
        '"labels":["a"]',
        '"command":["true"]',
        '"copies":2',
        '"calls" :["EEEE"]',
        '"c\\u0061lls":["EEEE"]',
        '"retries":1',
        '"retries":2',
    ]
)
BODIES = st.lists(MEMBERS, min_size=1, max_size=5).flatmap(
    lambda members: st.sampled_from(["", ",", " ", "{", '{"env":{', "[", '"']).map(
        lambda noise: "{" + ",".join(members) + noise
    )
)
CALLS = st.sampled_from(['"calls":["AAAA"]}', '"calls":["BBBB","CC"]}', '"calls":[]}', '"calls":[1]}', '"calls":["A"],"retries":5}', '"calls":["A"],"preload":["b"]}', "}"])  # fmt: skip


@given(st.lists(st.tuples(BODIES, CALLS), max_size=4), BODIES, CALLS)
def test_a_recognised_request_is_the_one_the_parser_finds(
    before: list[tuple[str, str]], head: str, calls: str
) -> None:
    requests = RepeatedRequests()
    for one in (*before, *((head, each) for _, each in before)):
        raw = "".join(one).encode()
        try:
            request = parsed(TaskRequest, raw)
            requests.keep(WantedTasks(request, None, head_of(raw)), spec_of(request))
        except Invalid:
            continue
    raw = (head + calls).encode()
    found = requests.find(raw)
    if found is not None:
        expected = parsed(TaskRequest, raw)
        assert found.request == expected
        assert found.spec == spec_of(expected)


def test_an_equal_request_of_a_command_is_recognised() -> None:
    body = '{"command":["true"],"gpu":"1","copies":3}'
    requests = known(body)
    found = requests.find(body.encode())
    assert found is not None
    assert found.request == parsed(TaskRequest, body.encode())
    assert found.spec == spec_of(found.request)
    assert requests.find(body.replace("3", "4").encode()) is None


def test_a_bounded_number_is_kept() -> None:
    bodies = [
        json.dumps({"name": f"n{n}"})[:-1] + f',{FUNCTION},"calls":["AAAA"]}}'
        for n in range(MOST_KNOWN + 5)
    ]
    requests = known(*bodies)
    assert len(requests) == MOST_KNOWN
    assert requests.find(bodies[0].encode()) is None
    assert requests.find(bodies[-1].encode()) is not None
