"""Frames of another release: what the last one sent is read, what is new is left out or replaced, the rest is refused."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from gpool.core.model import EndReason, Gpu, Health, Offer, Sharing, TaskKind, TaskSpec, Tier
from gpool.wire.frames import (
    OLDEST_PROTOCOL,
    PROTOCOL,
    Beat,
    BeatSeen,
    Finished,
    FromAgent,
    FromServer,
    Grants,
    Hello,
    Hold,
    Malformed,
    OfferChanged,
    Reached,
    Refused,
    Released,
    Reports,
    Started,
    Stop,
    StopReason,
    Welcome,
    common_protocol,
    encode,
)
from gpool.wire.tolerance import read_from_agent, read_from_server
from tests.wire.frame_schema import schema

RECORDED = Path(__file__).parents[1] / "recorded" / "frames.json"
OFFER = Offer(2000, 1 << 30, 1 << 30, gpus=(Gpu(0, "GPU-0", "H100", "nvidia", 80 << 30),))
SPEC = TaskSpec(TaskKind.COMMAND, "x", command=("true",))


def raw(frame: FromAgent | FromServer) -> Any:
    """A frame as lists and maps, to be changed."""
    return msgspec.msgpack.decode(encode(frame))


def sent(changed: Any) -> bytes:
    return msgspec.msgpack.encode(changed)


# ---- the release before


@pytest.mark.parametrize("part", ["positional", "named", "words"])
def test_frames_of_the_release_before_are_read_and_its_own_reader_reads_ours(part: str) -> None:
    """Positional fields are only added at the end, with a default; nothing is renamed or removed."""
    before: dict[str, str] = json.loads(RECORDED.read_text())[part]
    now: dict[str, str] = getattr(schema(), part)
    assert before, "nothing is recorded"
    for kind, recorded in before.items():
        old, new = recorded.split(), now[kind].split()
        if part == "positional":
            assert new[: len(old)] == old, kind
            added = new[len(old) :]
        else:
            assert set(old) <= set(new), kind
            added = [] if part == "words" else [name for name in new if name not in old]
        assert all(name.endswith("?") for name in added), f"{kind}: {added} need a default"


# ---- a later release


@pytest.mark.parametrize(
    "frame", [Beat(3, (Hold(1, 1),)), Reports(1, (Started(1, 1),)), OfferChanged(OFFER)]
)
def test_further_fields_of_an_agent_s_frame_are_ignored(frame: FromAgent) -> None:
    assert read_from_agent(sent([*_full(frame), "new", {"a": 1}])) == frame


@pytest.mark.parametrize("frame", [BeatSeen(1), Refused("conflict", "later", True)])
def test_further_fields_of_a_server_s_frame_are_ignored(frame: FromServer) -> None:
    assert read_from_server(sent([*_full(frame), "new"])) == frame


def _full(frame: FromAgent | FromServer) -> list[Any]:
    found: list[Any] = raw(frame)
    return found


def test_unknown_kinds_of_frames_are_left_out() -> None:
    assert read_from_agent(sent(["Sung", 1, 2])) is None
    assert read_from_server(sent(["Sung", 1, 2])) is None
    for wrong in ([], "Beat", {"a": 1}, [7, 8], ["Beat", "x"]):
        with pytest.raises(Malformed):
            read_from_agent(sent(wrong))


def test_unknown_reports_are_left_out_and_the_others_recorded() -> None:
    frame = raw(Reports(4, (Started(1, 1), Released(2, 1))))
    frame[2].insert(1, ["Danced", 9, 9])
    frame[2].append([*raw_item(Reached(3, 1, "run")), "later"])  # type: ignore[arg-type]
    frame[2].append([*raw_item(Reached(3, 1, "run"))[:3], "polish"])  # type: ignore[arg-type]
    read = read_from_agent(sent(frame))
    assert isinstance(read, Reports)
    assert [type(item) for item in read.items] == [Started, Released, Reached]


def raw_item(item: Any) -> list[Any]:
    found: list[Any] = msgspec.msgpack.decode(msgspec.msgpack.encode(item))
    return found


def test_an_unknown_end_is_a_fault_and_an_unknown_stop_stops() -> None:
    frame = raw(Reports(4, (Finished(1, 1, EndReason.EXITED, 0),)))
    frame[2][0][3] = "evaporated"
    read = read_from_agent(sent(frame))
    assert isinstance(read, Reports)
    [item] = read.items
    assert isinstance(item, Finished)
    assert item.reason is EndReason.SANDBOX_FAILED
    stop = raw(Stop((Hold(1, 1),), StopReason.STALE))
    stop[2] = "whim"
    assert read_from_server(sent(stop)) == Stop((Hold(1, 1),), StopReason.CANCELLED)


def test_an_offer_with_unknown_words_is_read_with_care() -> None:
    frame = raw(OfferChanged(OFFER))
    offer = frame[1]
    offer["tiers"] = ["container", "enclave"]
    offer["networks"] = ["none", "mesh"]
    offer["runtimes"] = [{"name": "new", "tier": "enclave"}, {"name": "old", "tier": "container"}]
    offer["gpus"][0] |= {"health": "feverish", "sharing": "rotating", "colour": "red"}
    offer["mood"] = "good"
    read = read_from_agent(sent(frame))
    assert isinstance(read, OfferChanged)
    assert read.offer.tiers == {Tier.CONTAINER}
    assert [each.name for each in read.offer.runtimes] == ["old"]
    [gpu] = read.offer.gpus
    assert (gpu.health, gpu.sharing) == (Health.QUARANTINED, Sharing.EXCLUSIVE)


@pytest.mark.parametrize("change", [{"tier": "enclave"}, {"network": "mesh"}])
def test_a_task_never_runs_under_other_conditions_than_it_asked_for(change: dict[str, str]) -> None:
    frame = raw(Grants(1, ((1, SPEC),), ()))
    assert isinstance(read_from_server(sent(frame)), Grants)  # control
    requirements = frame[2][0][1]["requirements"]
    [name] = change
    target = requirements if name in requirements else frame[2][0][1]
    assert name in target
    target |= change
    with pytest.raises(Malformed):
        read_from_server(sent(frame))


def test_values_of_a_wrong_type_stay_malformed() -> None:
    """Only words are replaced: a frame is not made valid by leaving out whatever is wrong in it."""
    frame = raw(OfferChanged(OFFER))
    frame[1]["tiers"] = ["enclave"]
    frame[1]["cpu_milli"] = "many"
    with pytest.raises(Malformed):
        read_from_agent(sent(frame))
    reports = raw(Reports(4, (Started(1, 1),)))
    reports[2].append(["Finished", 1, 1, "evaporated", "no exit code"])
    with pytest.raises(Malformed):
        read_from_agent(sent(reports))


# ---- versions


@pytest.mark.parametrize(
    ("newest", "oldest", "common"),
    [
        (PROTOCOL, OLDEST_PROTOCOL, PROTOCOL),
        (PROTOCOL, 0, PROTOCOL),  # of the release before, which speaks one version
        (PROTOCOL + 1, PROTOCOL, PROTOCOL),
        (PROTOCOL + 1, PROTOCOL + 1, None),
        (PROTOCOL + 1, 0, None),
        (OLDEST_PROTOCOL - 1, 0, None),
    ],
)
def test_the_newest_version_that_both_speak_is_used(
    newest: int, oldest: int, common: int | None
) -> None:
    assert common_protocol(newest, oldest) == common


def test_a_hello_and_a_welcome_of_the_release_before_have_its_only_version() -> None:
    hello = raw(Hello(1, "boot", OFFER, 1, ()))
    read = read_from_agent(sent(hello[:6]))
    assert isinstance(read, Hello)
    assert common_protocol(read.protocol, read.oldest_protocol) == 1
    welcome = raw(Welcome(1, 1, 1, 1, 1, ()))
    assert read_from_server(sent(welcome[:7])) == Welcome(1, 1, 1, 1, 1, (), 1)


@given(st.binary(max_size=64))
@example(bytes.fromhex("bcb11d682180428daef3e30f6472daf77b8a065a"))  # a text that is not UTF-8
@example(bytes.fromhex("81d40000c0"))  # a map with a key that has no hash
@example(b"\x91" * 4096)
def test_bytes_that_are_no_frame_are_malformed(data: bytes) -> None:
    for read in (read_from_agent, read_from_server):
        with contextlib.suppress(Malformed):
            read(data)
