"""Every route: who may ask, what it answers."""

from __future__ import annotations

import hashlib
from typing import Any

import httpx2
import pytest

from gpool.core.ids import NodeId, decode, encode
from gpool.core.model import Permission
from gpool.server.actions.tasks.documents import ResultLine, encode_many
from gpool.server.first_start import ensure_operator
from gpool.server.scheduling.loops import ExpireNodes, PruneStore
from gpool.wire.documents import ResultDocument
from gpool.wire.frames import Refused
from tests.server.server_desk import (
    FUNCTION_SHA256,
    Desk,
    an_offer,
    calls_document,
    exited,
    returned,
)
from tests.tools.nodes import a_key, join_request

pytestmark = pytest.mark.anyio

OPEN = {
    ("get", "/healthz"),
    ("get", "/readyz"),
    ("get", "/openapi.json"),
    ("get", "/.well-known/jwks.json"),
    ("post", "/v1/users"),
    ("post", "/v1/auth/password"),
    ("post", "/v1/auth/wallet/nonce"),
    ("post", "/v1/auth/wallet"),
    ("get", "/v1/auth/oidc/start"),
    ("post", "/v1/auth/oidc/finish"),
    ("post", "/v1/auth/refresh"),
    ("post", "/v1/nodes/challenges"),
    ("get", "/v1/receipt-keys"),
}
NOBODY = {"task": "t-" + "0" * 13, "batch": "b-" + "0" * 13, "node": "n-" + "0" * 13}


def every_route(desk: Desk) -> list[tuple[str, str]]:
    told = desk.app.openapi()["paths"]
    return [(method, path) for path, methods in told.items() for method in methods]


def filled(path: str) -> str:
    kind = "batch" if "batches" in path else "node" if "nodes" in path else "task"
    return (
        path.replace("{id}", NOBODY[kind])
        .replace("{gpu}", "g-" + "0" * 13)
        .replace("{sha256}", "0" * 64)
    )


async def test_no_route_but_health_and_the_ways_in_is_open_without_a_key(desk: Desk) -> None:
    for method, path in every_route(desk):
        if (method, path) in OPEN:
            continue
        for headers in ({"authorization": ""}, {"authorization": "Bearer gpk_wrong"}):
            answer = await desk.http.request(method, filled(path), headers=headers)
            assert answer.status_code == 401, (method, path, answer.text)
            assert answer.headers["content-type"] == "application/problem+json"


async def test_health_is_open(desk: Desk) -> None:
    for path in ("/healthz", "/readyz", "/openapi.json"):
        answer = await desk.get(path, headers={"authorization": ""})
        assert answer.status_code == 200


async def test_it_is_not_ready_before_it_is(desk: Desk) -> None:
    desk.app.state.ready = False
    assert (await desk.get("/readyz")).status_code == 503


async def test_strangers_see_nothing_of_anothers_tasks(desk: Desk) -> None:
    task = await desk.command()
    batch = (await desk.get(f"/v1/tasks/{task}")).json()["batch"]
    stranger = await desk.person("stranger", Permission.CONSUMER)
    missing = NOBODY["task"]
    for suffix in ("", "/logs", "/result", "/explain", "/events"):
        theirs = await desk.get(f"/v1/tasks/{task}{suffix}", headers=stranger)
        nobodys = await desk.get(f"/v1/tasks/{missing}{suffix}", headers=stranger)
        assert theirs.status_code == nobodys.status_code == 404
        assert theirs.text.replace(task, missing) == nobodys.text
    assert (await desk.http.delete(f"/v1/tasks/{task}", headers=stranger)).status_code == 404
    for method, path in (("GET", ""), ("DELETE", ""), ("GET", "/results")):
        answer = await desk.http.request(method, f"/v1/batches/{batch}{path}", headers=stranger)
        assert answer.status_code == 404
    answer = await desk.post("/v1/tasks", {"command": ["x"], "batch": batch}, headers=stranger)
    assert answer.status_code == 404
    assert (await desk.get("/v1/tasks?all=true", headers=stranger)).status_code == 403
    assert (await desk.get(f"/v1/tasks/{task}")).json()["status"] == "queued"


async def test_me_says_who_i_am(desk: Desk) -> None:
    me = (await desk.get("/v1/me")).json()
    assert me["name"] == "operator"
    assert me["permissions"] == ["consumer", "operator", "provider"]


async def test_listing_pages_newest_first(desk: Desk) -> None:
    ids = [await desk.command() for _ in range(5)]
    first = (await desk.get("/v1/tasks?limit=3")).json()
    second = (await desk.get(f"/v1/tasks?limit=3&cursor={first['next']}")).json()
    assert [item["id"] for item in first["items"] + second["items"]] == ids[::-1]
    assert second["next"] is None
    await desk.http.delete(f"/v1/tasks/{ids[0]}")
    ended = (await desk.get("/v1/tasks?status=cancelled,failed")).json()
    assert [item["id"] for item in ended["items"]] == [ids[0]]
    both = (await desk.get("/v1/tasks?status=cancelled&status=queued")).json()
    assert len(both["items"]) == 5


async def test_a_reader_who_has_it_already_gets_304(desk: Desk) -> None:
    task = await desk.command()
    for path in (f"/v1/tasks/{task}", "/v1/tasks", "/v1/nodes", "/v1/resources", "/v1/me"):
        first = await desk.get(path)
        again = await desk.get(path, headers={"if-none-match": first.headers["etag"]})
        assert (again.status_code, again.content) == (304, b"")
    await desk.http.delete(f"/v1/tasks/{task}")
    changed = await desk.get(f"/v1/tasks/{task}", headers={"if-none-match": first.headers["etag"]})
    assert changed.status_code == 200


async def test_explain_says_why_it_waits(desk: Desk) -> None:
    task = await desk.command(gpu="H100:2")
    before = (await desk.get(f"/v1/tasks/{task}/explain")).json()
    assert "join" in before["sentence"]
    await desk.agent()
    after = (await desk.get(f"/v1/tasks/{task}/explain")).json()
    assert after["sentence"] != before["sentence"]
    await desk.http.delete(f"/v1/tasks/{task}")
    ended = (await desk.get(f"/v1/tasks/{task}/explain")).json()
    assert ended["sentence"] == "It was cancelled."


async def test_a_wish_no_node_can_fulfil_is_accepted_and_explained(desk: Desk) -> None:
    await desk.agent()
    for wish in ({"cpus": 1024}, {"memory": "900TB"}, {"gpu": "H100:64"}, {"tier": "vm"}):
        task = await desk.command(**wish)
        await desk.schedule()
        told = (await desk.get(f"/v1/tasks/{task}/explain")).json()
        assert told["status"] == "queued"
        assert told["sentence"]


async def test_the_aliases_do_what_their_routes_do(desk: Desk) -> None:
    joined = await desk.post("/register_gpu", {"name": "alias", "gpus": [a_gpu()]})
    assert joined.status_code == 201
    [gpu] = (await desk.get("/resources")).json()["items"]
    assert (gpu["model"], gpu["node"], gpu["status"]) == ("A100", joined.json()["id"], "offline")
    task = (await desk.post("/submit_task", {"command": ["true"]})).json()["ids"][0]
    status = await desk.get(f"/task_status?id={task}")
    assert status.json() == (await desk.get(f"/v1/tasks/{task}")).json()


def a_gpu(index: int = 0) -> dict[str, object]:
    return {
        "index": index,
        "uuid": f"GPU-{index}",
        "model": "A100",
        "vendor": "nvidia",
        "memory_bytes": 1 << 36,
    }


async def test_resources_show_what_is_free(desk: Desk) -> None:
    agent = await desk.agent(offer=an_offer(cpus=4, gpus=2))
    await desk.command(gpu=1)
    await desk.command(vram="20GB")
    await desk.schedule()
    gpus = (await desk.get("/v1/resources")).json()["items"]
    assert sorted(gpu["status"] for gpu in gpus if gpu["kind"] == "gpu") == ["busy", "shared"]
    [cpu] = [gpu for gpu in gpus if gpu["kind"] == "cpu"]
    assert cpu["share_free"] == 0.25  # a whole GPU of two has two CPUs of four, a slice one
    assert (await desk.get(f"/v1/resources/{cpu['id']}")).json() == cpu
    assert (await desk.get(f"/v1/resources/{gpus[0]['id']}")).json() == gpus[0]
    node = (await desk.get(f"/v1/nodes/{cpu['node']}")).json()
    assert (node["status"], node["running"], len(node["gpus"])) == ("online", 2, 2)
    await agent.channel.close()
    assert (await desk.get(f"/v1/resources/{gpus[0]['id']}")).json()["status"] == "offline"


async def test_an_owner_keeps_a_gpu_and_lends_it_again(desk: Desk) -> None:
    await desk.agent(offer=an_offer(gpus=1))
    gpu = (await desk.get("/v1/resources")).json()["items"][0]
    kept = await desk.http.patch(f"/v1/resources/{gpu['id']}", json={"available": False})
    assert (kept.json()["status"], kept.json()["available"]) == ("paused", False)
    await desk.command(gpu=1)
    assert await desk.schedule() == 0
    await desk.http.patch(f"/v1/resources/{gpu['id']}", json={"available": True})
    assert await desk.schedule() == 1
    withdrawn = await desk.http.delete(f"/v1/resources/{gpu['id']}")
    assert withdrawn.json()["available"] is False


async def test_a_strangers_node_cannot_be_changed(desk: Desk) -> None:
    agent = await desk.agent(offer=an_offer(gpus=1))
    node = encode("node", agent.credentials.node)
    gpu = (await desk.get("/v1/resources")).json()["items"][0]["id"]
    other = await desk.person("other", Permission.PROVIDER)
    for method, path, body in (
        ("PATCH", f"/v1/nodes/{node}", {"availability": "paused"}),
        ("DELETE", f"/v1/nodes/{node}", None),
        ("PATCH", f"/v1/resources/{gpu}", {"available": False}),
        ("PATCH", f"/v1/resources/{node}", {"available": False}),
        ("DELETE", f"/v1/resources/{gpu}", None),
    ):
        answer = await desk.http.request(method, path, json=body, headers=other)
        assert answer.status_code == 404, answer.text
    assert (await desk.get(f"/v1/nodes/{node}")).json()["availability"] == "available"


async def test_a_draining_node_finishes_and_is_paused(desk: Desk) -> None:
    agent = await desk.agent()
    node = encode("node", agent.credentials.node)
    await desk.command()
    await desk.schedule()
    await desk.http.patch(f"/v1/nodes/{node}", json={"availability": "draining"})
    await desk.command()
    assert await desk.schedule() == 0
    await ExpireNodes(desk.server).run_once(desk.clock.now())
    assert (await desk.get(f"/v1/nodes/{node}")).json()["availability"] == "draining"
    assert (await desk.http.delete(f"/v1/nodes/{node}")).status_code == 409
    await agent.report(exited(agent.leases()[0]))
    await ExpireNodes(desk.server).run_once(desk.clock.now())
    assert (await desk.get(f"/v1/nodes/{node}")).json()["availability"] == "paused"
    await desk.http.patch(f"/v1/nodes/{node}", json={"availability": "available"})
    assert await desk.schedule() == 1


async def test_a_removed_node_is_cut_off(desk: Desk) -> None:
    agent = await desk.agent()
    node = encode("node", agent.credentials.node)
    assert (await desk.http.delete(f"/v1/nodes/{node}")).status_code == 204
    assert isinstance(agent.sent[-1], Refused)
    again = agent.again()
    await again.connect()
    assert isinstance(again.sent[-1], Refused)
    assert (await desk.get(f"/v1/nodes/{node}")).status_code == 404


async def test_a_node_joins_once_with_an_invite(desk: Desk) -> None:
    made = (await desk.post("/v1/nodes/invites", {"expires_in_s": 60})).json()
    assert made["link"] == f"gpool://127.0.0.1:8642/join/{made['token']}/{desk.server.gate.name}"

    async def join(number: int, **members: Any) -> httpx2.Response:
        challenge = (await desk.bare.post("/v1/nodes/challenges", json={})).json()
        return await desk.bare.post(
            "/v1/nodes", json=join_request(a_key(number), challenge, **members)
        )

    joined = await join(1, name="guest", token=made["token"], cpu_milli=1000)
    assert joined.status_code == 201
    node = NodeId(decode("node", joined.json()["id"]))
    assert await desk.server.gate.node(node) is not None
    lost = await join(1, name="guest", token=made["token"], cpu_milli=1000)
    assert (lost.status_code, lost.json()) == (201, joined.json())  # its answer was lost
    again = await join(2, name="guest2", token=made["token"])
    assert (again.status_code, again.json()["code"]) == (403, "forbidden")
    late = (await desk.post("/v1/nodes/invites", {"expires_in_s": 60})).json()["token"]
    desk.clock.advance(61)
    assert (await join(3, name="late", token=late)).status_code == 403


async def test_joining_takes_a_proof_of_the_key(desk: Desk) -> None:
    token = (await desk.post("/v1/nodes/invites", {"expires_in_s": 60})).json()["token"]
    challenge = (await desk.bare.post("/v1/nodes/challenges", json={})).json()
    good = join_request(a_key(1), challenge, name="guest", token=token)
    other = join_request(a_key(2), challenge)
    for wrong, status in (
        ({"name": "guest", "token": token}, 400),
        ({**good, "proof": None}, 400),
        ({**good, "public_key": "AAAA"}, 400),
        ({**good, "public_key": "A" * 43}, 400),  # signs for everybody
        ({**good, "proof": other["proof"]}, 403),
        ({**good, "public_key": other["public_key"]}, 403),
        ({**good, "proof": {**good["proof"], "nonce": "A" * 54}}, 403),
    ):
        answer = await desk.bare.post("/v1/nodes", json=wrong)
        assert answer.status_code == status, answer.text
    assert (await desk.bare.post("/v1/nodes", json=good)).status_code == 201
    assert (await desk.bare.post("/v1/nodes", json=good)).status_code == 403


async def test_a_machine_without_an_agent_is_registered_and_updated_by_its_owner(
    desk: Desk,
) -> None:
    first = await desk.post("/register_gpu", {"name": "plain"})
    again = await desk.post("/v1/resources", {"name": "plain", "gpus": [a_gpu()]})
    assert (first.status_code, again.json()["id"]) == (201, first.json()["id"])
    assert [gpu["kind"] for gpu in (await desk.get("/v1/resources")).json()["items"]] == ["gpu"]
    assert await desk.server.gate.node(NodeId(decode("node", first.json()["id"]))) is None


async def test_a_node_updates_its_offer_by_rest(desk: Desk) -> None:
    agent = await desk.node()
    async with desk.http_of(agent) as http:
        answer = await http.post("/v1/resources", json={"name": "bench", "gpus": [a_gpu()]})
    assert answer.status_code == 200
    assert [gpu["kind"] for gpu in (await desk.get("/v1/resources")).json()["items"]] == ["gpu"]


async def test_who_may_not_lend_or_submit_is_told_so(desk: Desk) -> None:
    consumer = await desk.person("consumer", Permission.CONSUMER)
    provider = await desk.person("provider", Permission.PROVIDER)
    for path, body, who in (
        ("/v1/nodes", {"name": "x"}, consumer),
        ("/v1/nodes/invites", {}, consumer),
        ("/v1/tasks", {"command": ["true"]}, provider),
    ):
        answer = await desk.post(path, body, headers=who)
        assert (answer.status_code, answer.json()["code"]) == (403, "forbidden")


async def test_a_nodes_token_opens_no_users_route(desk: Desk) -> None:
    async with desk.http_of(await desk.node()) as http:
        for path in ("/v1/tasks", "/v1/me", "/v1/nodes", "/metrics"):
            assert (await http.get(path)).status_code == 403


async def test_metrics_count_what_happened(desk: Desk) -> None:
    agent = await desk.agent()
    await desk.calls(2)
    await desk.schedule()
    await agent.report(*(returned(lease) for lease in agent.leases()))
    page = (await desk.get("/metrics")).text
    assert "gpool_tasks_submitted_total 2.0" in page
    assert 'gpool_tasks_ended_total{status="succeeded"} 2.0' in page
    assert "gpool_nodes_connected 1.0" in page


# ---- the same key, the same answer


async def test_a_submission_repeated_under_its_key_happens_once(desk: Desk) -> None:
    await desk.calls(1)
    headers = {"idempotency-key": "one"}
    first = await desk.post("/v1/tasks", calls_document(3), headers=headers)
    again = await desk.post("/v1/tasks", calls_document(3), headers=headers)
    assert (again.status_code, again.content) == (202, first.content)
    assert desk.server.picture.state.queued_count == 4
    other = await desk.post("/v1/tasks", calls_document(2), headers=headers)
    assert (other.status_code, other.json()["code"]) == (409, "key_reused")


async def test_a_key_is_its_users_own(desk: Desk) -> None:
    other = await desk.person("other", Permission.CONSUMER)
    document, key = {"command": ["true"]}, {"idempotency-key": "shared"}
    first = await desk.post("/v1/tasks", document, headers=key)
    theirs = await desk.post("/v1/tasks", document, headers={**other, **key})
    assert first.json()["ids"] != theirs.json()["ids"]


async def test_a_refused_submission_leaves_its_key_free(desk: Desk) -> None:
    headers = {"idempotency-key": "k"}
    refused = await desk.post("/v1/tasks", calls_document(1), headers=headers)
    assert (refused.status_code, refused.json()["missing"]) == (422, [FUNCTION_SHA256])
    await desk.calls(1)
    assert (await desk.post("/v1/tasks", calls_document(1), headers=headers)).status_code == 202


async def test_every_mutating_route_takes_a_key(desk: Desk) -> None:
    task = await desk.command()
    for path, body in (("/v1/nodes", {"name": "once"}), ("/v1/nodes/invites", {})):
        key = {"idempotency-key": path}
        first = await desk.post(path, body, headers=key)
        again = await desk.post(path, body, headers=key)
        assert first.status_code == again.status_code == 201
        assert first.json() == again.json()
    node = (await desk.get("/v1/nodes")).json()["items"][0]["id"]
    for _ in range(2):
        answer = await desk.http.patch(
            f"/v1/nodes/{node}", json={"availability": "paused"}, headers={"idempotency-key": "p"}
        )
        assert answer.json()["availability"] == "paused"
        gone = await desk.http.delete(f"/v1/tasks/{task}", headers={"idempotency-key": "c"})
        assert gone.json()["status"] == "cancelled"
    for _ in range(2):
        removed = await desk.http.delete(f"/v1/nodes/{node}", headers={"idempotency-key": "d"})
        assert removed.status_code == 204


async def test_no_secret_is_kept_with_a_key(desk: Desk) -> None:
    headers = {"idempotency-key": "secret"}
    token = (await desk.post("/v1/nodes/invites", {}, headers=headers)).json()["token"]
    await desk.server.store.close()
    database = (desk.server.settings.data / "gpool.db").read_bytes()
    assert token.encode() not in database
    assert hashlib.sha256(token.encode()).hexdigest().encode() in database


async def test_old_keys_are_forgotten(desk: Desk) -> None:
    headers = {"idempotency-key": "old"}
    first = await desk.post("/v1/tasks", {"command": ["true"]}, headers=headers)
    await PruneStore(desk.server).run_once(desk.clock.advance(86_401))
    again = await desk.post("/v1/tasks", {"command": ["true"]}, headers=headers)
    assert again.json()["ids"] != first.json()["ids"]


# ---- first start


async def test_the_first_account_is_found_again(desk: Desk) -> None:
    assert await ensure_operator(desk.server) == desk.key
    for name in ("operator.key", "server.key"):
        assert (desk.server.settings.data / name).stat().st_mode & 0o777 == 0o600


# ---- written twice for speed, held together here


def test_fast_documents_say_what_the_slow_ones_do() -> None:
    assert list(ResultLine.__struct_fields__) == list(ResultDocument.model_fields)


def test_many_ids_are_spelled_as_one_is() -> None:
    numbers = [0, 1, 1023, 1024, 1025, (1 << 62) + 12345, (1 << 63) - 1]
    spelled = encode_many("task", numbers)
    assert spelled == [encode("task", number) for number in numbers]
    assert [decode("task", text) for text in spelled] == numbers
