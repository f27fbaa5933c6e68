"""The GPU grammar: every form, real cards, errors that point at the character."""

from __future__ import annotations

from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpool.core.errors import BadGpuSpec
from gpool.core.model import GIB, MIB, GpuRequest
from gpool.core.specs import gpu as gpuspec
from tests.core.scheduler.state.builders import MEMORY_MIB, a_gpu

GB = 10**9


@pytest.mark.parametrize(
    ("text", "requests"),
    [
        (None, ()),
        (0, ()),
        ("0", ()),
        (" 0 ", ()),
        (1, (GpuRequest(),)),
        ("1", (GpuRequest(),)),
        (1.0, (GpuRequest(),)),
        (True, (GpuRequest(),)),
        ("2", (GpuRequest(2),)),
        ("A100", (GpuRequest(model="A100"),)),
        ("H100:2", (GpuRequest(2, "H100"),)),
        ("A100-80GB:2", (GpuRequest(2, "A100", min_memory_bytes=80 * GB),)),
        ("A100:80GB:2", (GpuRequest(2, "A100", min_memory_bytes=80 * GB),)),
        ("a100 : 2 : 80 gb", (GpuRequest(2, "A100", min_memory_bytes=80 * GB),)),
        ("A100-SXM4-80GB", (GpuRequest(1, "A100SXM4", min_memory_bytes=80 * GB),)),
        ("24GB", (GpuRequest(min_memory_bytes=24 * GB),)),
        ("24GB..", (GpuRequest(min_memory_bytes=24 * GB),)),
        (">=24GB", (GpuRequest(min_memory_bytes=24 * GB),)),
        (">= 24 GB", (GpuRequest(min_memory_bytes=24 * GB),)),
        ("24GB+", (GpuRequest(min_memory_bytes=24 * GB),)),
        ("24G", (GpuRequest(min_memory_bytes=24 * GB),)),
        ("24GiB", (GpuRequest(min_memory_bytes=24 * GIB),)),
        ("1.5GB", (GpuRequest(min_memory_bytes=3 * GB // 2),)),
        ("24GB:4", (GpuRequest(4, min_memory_bytes=24 * GB),)),
        ("40GB..80GB", (GpuRequest(min_memory_bytes=40 * GB, max_memory_bytes=80 * GIB),)),
        ("..24GB", (GpuRequest(max_memory_bytes=24 * GIB),)),
        ("nvidia", (GpuRequest(vendor="nvidia"),)),
        ("AMD:2", (GpuRequest(2, vendor="amd"),)),
        ("A10G,A100", (GpuRequest(model="A10G"), GpuRequest(model="A100"))),
        ("0.5", (GpuRequest(share_milli=500),)),
        (0.5, (GpuRequest(share_milli=500),)),
        (0.25, (GpuRequest(share_milli=250),)),
        (1 / 3, (GpuRequest(share_milli=333),)),
        (".125", (GpuRequest(share_milli=125),)),
        ("H100:0.5", (GpuRequest(model="H100", share_milli=500),)),
        ("vram=6GB", (GpuRequest(vram_bytes=6 * GB),)),
        ("4090", (GpuRequest(model="RTX4090"),)),
        ("rtx 4090", (GpuRequest(model="RTX4090"),)),
        ("RTX-4090:2", (GpuRequest(2, "RTX4090"),)),
        ("NVIDIA GeForce RTX 4090", (GpuRequest(model="RTX4090"),)),
        ("1080 Ti", (GpuRequest(model="GTX1080TI"),)),
    ],
)
def test_every_form_means_what_the_design_says(
    text: str | int | float | None, requests: tuple[GpuRequest, ...]
) -> None:
    assert gpuspec.parse(text) == requests


def test_vram_asks_for_a_slice_of_any_gpu_or_of_a_named_one() -> None:
    assert gpuspec.parse(None, "6GB") == (GpuRequest(vram_bytes=6 * GB),)
    assert gpuspec.parse(1, "6GB") == (GpuRequest(vram_bytes=6 * GB),)
    assert gpuspec.parse("A100", "6GB") == (GpuRequest(model="A100", vram_bytes=6 * GB),)
    assert gpuspec.parse("0.5", "6GB") == (GpuRequest(share_milli=500, vram_bytes=6 * GB),)


@pytest.mark.parametrize(
    ("text", "position", "says"),
    [
        ("", 0, "empty"),
        ("  ", 0, "empty"),
        ("A100:", 5, "missing"),
        ("A10G,,A100", 5, "missing"),
        ("A100,H1$0", 7, "'$' cannot stand here"),
        ("H100:99", 5, "at most 64"),
        ("H100:0", 5, "at least 1"),
        ("1.5", 0, "below 1"),
        ("0.0001", 0, "0.001"),
        ("A100:2:3", 7, "given twice"),
        ("H100:x", 5, "'x' is no number of GPUs"),
        ("80GB..40GB", 0, "smaller size first"),
        ("40GB..x", 6, "not a size"),
        ("..", 0, "needs a size"),
        (">=24", 2, "not a size"),
        ("A100:vram=2QB", 10, "not a size"),
        ("vram=6GB:2", 0, "one GPU"),
        ("A10G,H100:2:0.5", 5, "either whole GPUs or a fraction"),
        ("0GB", 0, "nothing"),
        ("-1", 0, "cannot stand here"),
        ("A100;2", 4, "';' cannot stand here"),
        ("99999999999999999999GB", 0, "digits"),
        ("9999999TB", 0, "larger than any GPU"),
        (",".join(["A100"] * 17), 80, "alternatives"),
        ("A" * 500, 399, "longer"),
        (float("nan"), 0, "not a number"),
        (float("inf"), 0, "not a number"),
        (-1, 0, "0 to 64"),
        (4090, 0, "as text"),
        (1e300, 0, "0 to 64"),
        ("40900", 0, "at most 64"),
    ],
)
def test_an_error_points_at_the_character_and_says_what_to_write(
    text: str | int | float, position: int, says: str
) -> None:
    with pytest.raises(BadGpuSpec) as raised:
        gpuspec.parse(text)
    error = raised.value
    assert error.position == position
    assert says in error.detail
    if not error.text.strip():
        return  # nothing to point at
    *_, shown, caret = error.detail.split("\n")
    assert caret == "  " + " " * position + "^"
    assert shown.startswith("  ")


@pytest.mark.parametrize(
    ("gpu", "vram", "says"),
    [
        ("0", "6GB", "leave gpu out"),
        ("2", "6GB", "leave out the count"),
        ("vram=4GB", "6GB", "given twice"),
        (None, "6", "not a size"),
        (None, "", "not a size"),
    ],
)
def test_vram_that_cannot_be_meant_is_refused(gpu: str | None, vram: str, says: str) -> None:
    with pytest.raises(BadGpuSpec, match=says):
        gpuspec.parse(gpu, vram)


@pytest.mark.parametrize(
    ("spec", "names"),
    [
        ("A10", set()),
        ("A10G", {"NVIDIA A10G"}),
        ("A100", {"NVIDIA A100-SXM4-40GB", "NVIDIA A100-SXM4-80GB"}),
        ("A100-SXM4", {"NVIDIA A100-SXM4-40GB", "NVIDIA A100-SXM4-80GB"}),
        ("A100-80GB", {"NVIDIA A100-SXM4-80GB"}),
        ("A100:..40GB", {"NVIDIA A100-SXM4-40GB"}),
        ("H100", {"NVIDIA H100 80GB HBM3"}),
        ("H100-80GB", {"NVIDIA H100 80GB HBM3"}),
        ("H200-141GB", {"NVIDIA H200"}),
        ("RTX4090", {"NVIDIA GeForce RTX 4090"}),
        ("4090", {"NVIDIA GeForce RTX 4090"}),
        ("GeForce RTX 4090", {"NVIDIA GeForce RTX 4090"}),
        ("T4", {"Tesla T4"}),
        ("16GB..24GB", {"Tesla T4", "NVIDIA A10G", "NVIDIA GeForce RTX 4090"}),
        ("24GB..24GB", {"NVIDIA A10G", "NVIDIA GeForce RTX 4090"}),
        (
            "40GB..80GB",
            {"NVIDIA A100-SXM4-40GB", "NVIDIA A100-SXM4-80GB", "NVIDIA H100 80GB HBM3"},
        ),
        ("80GB", {"NVIDIA A100-SXM4-80GB", "NVIDIA H100 80GB HBM3", "NVIDIA H200"}),
        ("nvidia", set(MEMORY_MIB)),
        ("amd", set()),
    ],
)
def test_real_cards_match_what_their_owners_would_call_them(spec: str, names: set[str]) -> None:
    (request,) = gpuspec.parse(spec)
    assert {name for name in MEMORY_MIB if gpuspec.matches(request, a_gpu(0, name))} == names


@pytest.mark.parametrize(
    ("wanted", "name", "is_one"),
    [
        ("RTX 3080", "NVIDIA GeForce RTX 3080 Ti", False),
        ("3080ti", "NVIDIA GeForce RTX 3080 Ti", True),
        ("RTX4090", "NVIDIA GeForce RTX 4090 Laptop GPU", False),
        ("A6000", "NVIDIA RTX A6000", True),
        ("RTX A6000", "NVIDIA RTX A6000", True),
        ("RTX6000", "NVIDIA RTX 6000 Ada Generation", False),
        ("RTX 6000 Ada", "NVIDIA RTX 6000 Ada Generation", True),
        ("L40", "NVIDIA L40S", False),
        ("V100", "Tesla V100-SXM2-16GB", True),
        ("A100", "NVIDIA A100 80GB PCIe", True),
        ("H100", "NVIDIA H100 NVL", True),
        ("H100NVL", "NVIDIA H100 PCIe", False),
        ("MI300X", "AMD Instinct MI300X OAM", True),
        ("M2", "Apple M2 Max", False),
        ("4090", "RTX4090", True),  # a simulated one may be called so
        ("H100", "H100", True),
        ("H100", "GH100", False),
    ],
)
def test_a_model_matches_its_own_cards_only(wanted: str, name: str, is_one: bool) -> None:
    assert gpuspec.is_model(wanted, name) is is_one


@pytest.mark.parametrize(
    ("text", "size"),
    [("6GB", 6 * GB), ("6 gb", 6 * GB), ("6GiB", 6 * GIB), ("512MiB", 512 * MIB), ("7B", 7)],
)
def test_sizes(text: str, size: int) -> None:
    assert gpuspec.parse_bytes(text) == size


letters = st.text("0123456789.:,+->= GBgbiAHRTXa10nvidvram\t\u0663\x00é", max_size=24)


@given(st.one_of(st.text(max_size=40), letters), st.one_of(st.none(), letters, st.text(max_size=9)))
def test_no_text_ever_raises_anything_but_bad_gpu_spec(gpu: str, vram: str | None) -> None:
    try:
        requests = gpuspec.parse(gpu, vram)
    except BadGpuSpec as error:
        position, end = error.position, len(error.text)
    else:
        position = end = 0
        assert gpuspec.parse(gpuspec.format(requests)) == requests
    assert 0 <= position <= end


@given(st.one_of(st.integers(), st.floats()))
def test_no_number_ever_raises_anything_but_bad_gpu_spec(gpu: float) -> None:
    with suppress(BadGpuSpec):
        gpuspec.parse(gpu)


sizes = st.one_of(
    st.integers(1, 1 << 50),
    st.integers(1, 900).map(lambda n: n * GB),
    st.integers(1, 99).map(lambda n: n * GIB),
)
models = st.sampled_from(["A100", "RTX4090", "H100", "MI300X", "T4", "GTX1080TI", "A100SXM4", "X"])


@st.composite
def requests_of_any_kind(draw: st.DrawFn) -> GpuRequest:
    low, high = sorted((draw(sizes), draw(sizes)))
    kind = draw(st.sampled_from(["whole", "share", "vram"]))
    return GpuRequest(
        count=draw(st.integers(1, 64)) if kind == "whole" else 1,
        model=draw(st.none() | models),
        vendor=draw(st.none() | st.sampled_from(sorted(gpuspec.VENDORS))),
        min_memory_bytes=draw(st.none() | st.just(low)),
        max_memory_bytes=draw(st.none() | st.just(high)),
        share_milli=1000 if kind == "whole" else draw(st.integers(1, 999)),
        vram_bytes=draw(sizes) if kind == "vram" else None,
    )


@given(st.lists(requests_of_any_kind(), max_size=5).map(tuple))
def test_what_is_written_always_reads_back_the_same(requests: tuple[GpuRequest, ...]) -> None:
    if all(len(gpuspec.format((r,))) < 80 for r in requests):
        assert gpuspec.parse(gpuspec.format(requests)) == requests


def test_a_caret_is_shown_under_the_character_and_never_under_nothing() -> None:
    with pytest.raises(BadGpuSpec) as caught:
        gpuspec.parse("H100:x:y")
    assert caught.value.detail.endswith("\n  H100:x:y\n       ^")
    with pytest.raises(BadGpuSpec) as caught:
        gpuspec.parse("")
    assert "\n" not in caught.value.detail


@pytest.mark.parametrize("text", ["nvidia 1k", "1-K", "geforce-24GB+", "Tesla 0K"])
def test_a_brand_before_a_size_is_never_taken_for_a_model(text: str) -> None:
    with pytest.raises(BadGpuSpec):
        gpuspec.parse(text)


@given(st.integers(1, 10**13))
def test_a_size_as_it_is_typed_always_means_the_same_bytes(size: int) -> None:
    assert gpuspec.parse_bytes(gpuspec.typed_size(size)) == size


@pytest.mark.parametrize(
    ("size", "typed", "told"),
    [
        (4 * 10**9, "4GB", "3.7 GiB"),
        (24 << 30, "24GiB", "24 GiB"),
        (512 << 20, "512MiB", "0.5 GiB"),
        (24_146_608_128, "23028MiB", "22.5 GiB"),
    ],
)
def test_a_size_is_typed_in_whole_units_and_told_in_gib(size: int, typed: str, told: str) -> None:
    assert (gpuspec.typed_size(size), gpuspec.gib(size)) == (typed, told)
