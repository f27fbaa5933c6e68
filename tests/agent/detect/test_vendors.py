"""Parsers of other vendors' tools: right on what they print, never lost on what they should not."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpool.agent.machine import vendors
from gpool.agent.machine.vendors import ParsedGpus

RECORDED = sorted((Path(__file__).parent / "recorded").glob("*.json"))
READERS: Mapping[str, Callable[..., ParsedGpus]] = {
    "amd_smi": vendors.amd_smi,
    "rocm_smi": vendors.rocm_smi,
    "xpu_smi": vendors.xpu_smi,
    "drm": vendors.drm,
    "apple": vendors.apple,
}


def recording(path: Path) -> tuple[dict[str, Any], str, list[Any]]:
    told = json.loads(path.read_text())
    ((reader, arguments),) = told["sources"].items()
    return told, reader, arguments


@pytest.mark.parametrize("path", RECORDED, ids=lambda path: path.stem)
def test_a_recorded_card_is_read_as_what_it_is(path: Path) -> None:
    told, reader, arguments = recording(path)
    assert "not captured live" in told["about"]
    parsed = READERS[reader](*arguments)
    assert parsed.complaints == ()
    found = [[gpu.uuid, gpu.model, gpu.vendor, gpu.memory_bytes] for gpu in parsed.gpus]
    assert found == told["expect"]
    assert [gpu.index for gpu in parsed.gpus] == list(range(len(found)))
    assert all(gpu.details is not None for gpu in parsed.gpus)
    assert all(bool(gpu.closed) == (gpu.vendor == "apple") for gpu in parsed.gpus)


def test_there_are_recordings_of_six_cards_or_more() -> None:
    assert len(RECORDED) >= 6


def test_details_are_read_where_they_are_told() -> None:
    _, _, arguments = recording(next(p for p in RECORDED if p.stem == "amd-mi300x"))
    details = vendors.amd_smi(*arguments).gpus[0].details
    assert details is not None
    assert (details.driver, details.capability, details.bus) == ("6.10.5", "gfx942", "0000:05:00.0")
    assert (details.pcie, details.power_limit_mw) == ("gen5 x16", 750_000)


junk = st.recursive(
    st.none() | st.booleans() | st.floats() | st.integers() | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner, max_size=3)
    ),
    max_leaves=6,
)


def bent(value: Any, data: st.DataObject) -> Any:
    """The same document with something in it replaced, dropped, doubled or cut."""
    if isinstance(value, dict) and value and data.draw(st.booleans()):
        key = data.draw(st.sampled_from(sorted(value)))
        match data.draw(st.integers(0, 2)):
            case 0:
                return {name: one for name, one in value.items() if name != key}
            case 1:
                return {**value, key: data.draw(junk)}
        return {**value, key: bent(value[key], data)}
    if isinstance(value, list) and value:
        at = data.draw(st.integers(0, len(value) - 1))
        if data.draw(st.booleans()):
            return [*value, value[at]]
        return [*value[:at], bent(value[at], data), *value[at + 1 :]]
    return data.draw(junk)


@settings(max_examples=150, deadline=None)
@given(st.sampled_from(RECORDED), st.data())
def test_a_bent_recording_never_crashes_a_parser_and_never_makes_a_bad_gpu(
    path: Path, data: st.DataObject
) -> None:
    _, reader, arguments = recording(path)
    at = data.draw(st.integers(0, len(arguments) - 1))
    argument = arguments[at]
    if isinstance(argument, str) and argument:
        if data.draw(st.booleans()):
            argument = json.dumps(bent(json.loads(argument), data))
        else:
            cut = data.draw(st.integers(0, len(argument)))
            argument = argument[:cut] + data.draw(st.text(max_size=4))
    elif isinstance(argument, dict):
        texts = st.text(max_size=20)
        key = data.draw(st.sampled_from(sorted(argument)))
        argument = {
            **argument,
            key: data.draw(texts)
            if isinstance(argument[key], str)
            else {name: data.draw(texts) for name in argument[key]},
        }
    parsed = READERS[reader](*[*arguments[:at], argument, *arguments[at + 1 :]])
    assert len({gpu.uuid for gpu in parsed.gpus}) == len(parsed.gpus)
    for gpu in parsed.gpus:
        assert gpu.uuid.isprintable()
        assert gpu.model
        assert 0 < gpu.memory_bytes <= vendors.MOST_MEMORY
    assert all(complaint and len(complaint) < 300 for complaint in parsed.complaints)


@pytest.mark.parametrize(
    ("reader", "arguments"),
    [
        ("amd_smi", ["ERROR: amdgpu driver not found", ""]),
        ("amd_smi", ["[]garbage", ""]),
        ("rocm_smi", ["\x1b[31mWARNING\x1b[0m"]),
        ("xpu_smi", ['{"error": "Level Zero Initialization Error"}', {}]),
        ("apple", ["{}"]),
    ],
)
def test_garbage_is_complained_of_by_the_tools_name(reader: str, arguments: list[Any]) -> None:
    parsed = READERS[reader](*arguments)
    assert parsed.gpus == ()
    if reader != "apple":
        assert parsed.complaints
        assert all("smi" in complaint for complaint in parsed.complaints)


@pytest.mark.parametrize(
    ("name", "model"),
    [
        ("AMD Instinct MI300X", "MI300X"),
        ("Radeon RX 7900 XTX", "RX7900XTX"),
        ("Intel(R) Data Center GPU Max 1550", "MAX1550"),
        ("Intel(R) Arc(TM) A770 Graphics", "A770"),
        ("Apple M2 Ultra", "M2ULTRA"),
        ("NVIDIA RTX A6000", "RTXA6000"),
    ],
)
def test_other_vendors_cards_have_the_names_consumers_write(name: str, model: str) -> None:
    assert vendors.normalised(name) == model
