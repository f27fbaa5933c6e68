"""Many refreshes at once with one token: one family survives, and everybody honest gets the same successor."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import httpx2
import pytest

from tests.server.identity_routes.people_desk import registered
from tests.server.server_desk import Desk, StoppedClock, open_desk

pytestmark = pytest.mark.anyio

PARALLEL = 50
RACES = 500 if os.environ.get("GPOOL_SOAK") else 50


async def test_parallel_refreshes_give_one_successor(desk: Desk) -> None:
    ada = await registered(desk, "ada")
    for _ in range(RACES):
        token = {"refresh_token": ada.tokens["refresh_token"]}
        answers = await asyncio.gather(
            *(desk.bare.post("/v1/auth/refresh", json=token) for _ in range(PARALLEL))
        )
        assert {answer.status_code for answer in answers} == {200}
        assert len({answer.json()["refresh_token"] for answer in answers}) == 1
        ada.tokens = answers[0].json()
        desk.clock.advance(1)
    sessions = (await ada.ask("GET", "/v1/sessions")).json()["items"]
    assert len(sessions) == 1
    assert (await ada.ask("GET", "/v1/me")).status_code == 200


async def test_replicas_race_to_one_successor(data: Path) -> None:
    clock = StoppedClock()
    desks = [await open_desk(data, clock) for _ in range(2)]
    ada = await registered(desks[0], "ada")
    for _ in range(10):
        token = {"refresh_token": ada.tokens["refresh_token"]}
        answers: list[httpx2.Response] = await asyncio.gather(
            *(
                desks[number % 2].bare.post("/v1/auth/refresh", json=token)
                for number in range(PARALLEL)
            )
        )
        assert {answer.status_code for answer in answers} == {200}
        assert len({answer.json()["refresh_token"] for answer in answers}) == 1
        ada.tokens = answers[0].json()
    for desk in desks:
        await desk.server.store.close()


async def test_of_thieves_and_owners_at_once_nobody_stays_signed_in(desk: Desk) -> None:
    """A token two generations old, shown beside the current one: whoever comes first, the family ends."""
    ada = await registered(desk, "ada")
    old = {"refresh_token": ada.tokens["refresh_token"]}
    await ada.refresh()
    await ada.refresh()
    new = {"refresh_token": ada.tokens["refresh_token"]}
    answers = await asyncio.gather(
        *(desk.bare.post("/v1/auth/refresh", json=old if n % 5 == 0 else new) for n in range(20))
    )
    assert all(answer.status_code in (200, 401) for answer in answers)
    stolen = [answer for n, answer in enumerate(answers) if n % 5 == 0]
    assert {answer.status_code for answer in stolen} == {401}
    for answer in answers:
        if answer.status_code == 200:
            again = {"refresh_token": answer.json()["refresh_token"]}
            assert (await desk.bare.post("/v1/auth/refresh", json=again)).status_code == 401
