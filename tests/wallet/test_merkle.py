"""Merkle trees: what a proof proves, and what it never does."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpool.wallet import crypto
from gpool.wallet.crypto import keccak256
from gpool.wallet.errors import BadTree

values = st.lists(st.binary(max_size=80), min_size=1, max_size=40, unique=True)


def encoded(account: str, amount: str) -> bytes:
    """The ABI encoding of (address, uint256): two words."""
    return bytes.fromhex(account[2:]).rjust(32, b"\0") + int(amount).to_bytes(32, "big")


def test_trees_are_those_of_openzeppelins_own_library(own: Callable[[str], Any]) -> None:
    cases = own("merkle")["trees"]
    assert len(cases) >= 10
    for case in cases:
        claims = [encoded(*claim) for claim in case["claims"]]
        tree = crypto.MerkleTree.of(claims)
        assert tree.root.hex() == case["root"][2:]
        for claim, proof in zip(claims, case["proofs"], strict=True):
            assert [each.hex() for each in tree.proof(claim)] == [each[2:] for each in proof]
            assert crypto.verify(tree.root, claim, tree.proof(claim))


@given(values)
def test_every_value_is_always_proven(held: list[bytes]) -> None:
    tree = crypto.MerkleTree.of(held)
    assert all(crypto.verify(tree.root, value, tree.proof(value)) for value in held)


@given(values, st.randoms(use_true_random=False))
def test_the_root_never_depends_on_the_order(held: list[bytes], dice: Any) -> None:
    mixed = list(held)
    dice.shuffle(mixed)
    assert crypto.MerkleTree.of(mixed).root == crypto.MerkleTree.of(held).root


@given(values, st.binary(max_size=80))
def test_another_value_is_never_proven(held: list[bytes], other: bytes) -> None:
    if other in held:
        return
    tree = crypto.MerkleTree.of(held)
    for value in held:
        assert not crypto.verify(tree.root, other, tree.proof(value))
    with pytest.raises(BadTree, match="does not contain"):
        tree.proof(other)


@given(values, st.data())
def test_a_changed_proof_never_holds(held: list[bytes], data: st.DataObject) -> None:
    tree = crypto.MerkleTree.of(held)
    value = data.draw(st.sampled_from(held))
    proof = list(tree.proof(value))
    assert not crypto.verify(tree.root, value, [*proof, bytes(32)])
    if proof:
        assert not crypto.verify(tree.root, value, proof[:-1])
        at = data.draw(st.integers(0, len(proof) - 1))
        bit = 1 << data.draw(st.integers(0, 255))
        changed = (int.from_bytes(proof[at], "big") ^ bit).to_bytes(32, "big")
        assert not crypto.verify(tree.root, value, [*proof[:at], changed, *proof[at + 1 :]])


def test_an_inner_node_never_passes_for_a_value() -> None:
    """The second-preimage attack: claim the 64 bytes that were hashed to make an inner node."""
    tree = crypto.MerkleTree.of([b"a", b"b", b"c", b"d"])
    left, right = tree.nodes[1:3]
    forged = b"".join(sorted(tree.nodes[3:5]))
    assert keccak256(forged) == left
    assert not crypto.verify(tree.root, forged, [right])
    assert crypto.verify_leaf(tree.root, keccak256(forged), [right])  # with leaves hashed once


def test_a_tree_of_one_is_its_leaf() -> None:
    tree = crypto.MerkleTree.of([b"alone"])
    assert (tree.root, tree.proof(b"alone")) == (crypto.leaf(b"alone"), ())


def test_what_cannot_be_a_tree_is_refused() -> None:
    with pytest.raises(BadTree, match="at least one"):
        crypto.MerkleTree.of([])
    with pytest.raises(BadTree, match="32 bytes"):
        crypto.MerkleTree.of_leaves([bytes(31)])


def test_pieces_of_the_wrong_length_prove_nothing() -> None:
    tree = crypto.MerkleTree.of([b"a", b"b"])
    (sibling,) = tree.proof(b"a")
    assert not crypto.verify(tree.root, b"a", [sibling[:16], sibling[16:]])
    assert not crypto.verify(tree.root[:31], b"a", [sibling])
    assert not crypto.verify(tree.root, b"a", [sibling] * 65)
