"""Nodes as tests make them: a key of their own, joined by whatever way the test talks to the server."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from gpool.agent.channel import AgentCredentials, NodeIdentity
from gpool.agent.daemon import boot_clock
from gpool.transfer.node_proofs import ChallengeStatement, NodeKey, Purpose, public_text


def a_key(number: int = 1) -> NodeKey:
    return NodeKey(number.to_bytes(32, "big"))


def join_request(key: NodeKey, challenge: dict[str, Any], **members: Any) -> dict[str, Any]:
    """What `POST /v1/nodes` takes of a node that holds this key."""
    nonce = challenge["nonce"]
    statement = ChallengeStatement(Purpose.JOIN, challenge["server"], "", key.public, nonce)
    proof = {"nonce": nonce, "signature": key.sign(statement)}
    return {**members, "public_key": public_text(key.public), "proof": proof}


def joined(
    ask: Callable[[str, dict[str, Any]], dict[str, Any]],
    key: NodeKey,
    clock: Callable[[], int] = boot_clock,
    **members: Any,
) -> AgentCredentials:
    """A node that has joined. `ask` posts a document and gives the answer's."""
    challenge = ask("/v1/nodes/challenges", {})
    answer = ask("/v1/nodes", join_request(key, challenge, **members))
    return AgentCredentials(key, NodeIdentity(answer["id"], answer["server"]), clock)
