"""Recipes in normal form and their names."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpool.core.errors import Invalid
from gpool.core.model import Recipe
from gpool.core.specs.fields import MAX_PACKAGES, environment_kind, environment_name, recipe

NAMES = st.from_regex(r"[A-Za-z0-9]([A-Za-z0-9._-]{0,8}[A-Za-z0-9])?", fullmatch=True)
CLAUSES = st.lists(
    st.builds(
        lambda sign, version: sign + version,
        st.sampled_from(["==", ">=", "<=", "<", ">", "!=", "~=", "==="]),
        st.sampled_from(["1", "2.0", "1.*", "2!1.0", "1.0+cpu", "3.0rc1"]),
    ),
    max_size=3,
)
EXTRAS = st.lists(st.sampled_from(["a", "b", "gpu"]), max_size=3)
MARKERS = st.sampled_from(["", "; python_version < '3.12'", ' ; sys_platform == "linux"'])
GAPS = st.sampled_from(["", " ", "  "])


@st.composite
def requirements(draw: st.DrawFn) -> tuple[str, str]:
    """The same requirement, written in two ways."""
    name, clauses, extras = draw(NAMES), draw(CLAUSES), draw(EXTRAS)
    marker, gap = draw(MARKERS), draw(GAPS)
    held = f"[{','.join(extras)}]" if extras else ""
    plain = f"{name}{held}{','.join(clauses)}{marker}"
    turned = f"[{(gap + ',').join(reversed(extras))}]" if extras else ""
    written = f"{gap}{name.upper()}{gap}{turned}{gap}{(',' + gap).join(reversed(clauses))}{gap}{marker}{gap}"
    return plain, written


@given(st.lists(requirements(), min_size=1, max_size=5), st.sampled_from([None, "3.12"]))
def test_what_means_the_same_always_has_one_name(
    pairs: list[tuple[str, str]], python: str | None
) -> None:
    one = recipe(python, tuple(plain for plain, _ in pairs))
    other = recipe(python, tuple(written for _, written in reversed(pairs)))
    assert one == other
    assert environment_name(one) == environment_name(other)
    assert environment_kind(environment_name(one)) == "pip"


@given(st.lists(requirements(), max_size=5))
def test_a_normal_form_is_always_its_own(pairs: list[tuple[str, str]]) -> None:
    once = recipe(packages=tuple(written for _, written in pairs))
    assert recipe(once.python, once.packages, once.image) == once


@given(st.sets(NAMES, max_size=4), st.sets(NAMES, max_size=4))
def test_other_packages_never_share_a_name(one: set[str], other: set[str]) -> None:
    first, second = recipe(packages=tuple(one)), recipe(packages=tuple(other))
    assert (first == second) == (environment_name(first) == environment_name(second))


@given(st.text(max_size=40))
def test_a_text_is_a_requirement_of_one_line_or_is_refused(text: str) -> None:
    try:
        (made,) = recipe(packages=(text,)).packages
    except Invalid:
        return
    assert made.isprintable()
    assert made[0].isalnum()


@pytest.mark.parametrize(
    ("written", "normal"),
    [
        ("numpy", "numpy"),
        ("Ruamel.Yaml_Clib", "ruamel-yaml-clib"),
        ("numpy (>=2, <3)", "numpy<3,>=2"),
        ("rich[jupyter , all]>=14", "rich[all,jupyter]>=14"),
        ("torch==2.13.0+cpu", "torch==2.13.0+cpu"),
        ("x ;python_version<'3.12' and (os_name == \"posix\")", None),
    ],
)
def test_requirements_are_written_one_way(written: str, normal: str | None) -> None:
    (made,) = recipe(packages=(written,)).packages
    assert made == (normal or "x; python_version<'3.12' and (os_name == \"posix\")")


@pytest.mark.parametrize(
    "written",
    [
        "",
        "-e .",
        "./here",
        "../up",
        "a b",
        "a>=1 --index-url=x",
        "a; x --hash=sha256:00 # c",
        "a;",
        "a @ file:///x",
        "a@https://example.test/a.whl",
        "a[b]@ x",
        "https://example.test/a.whl",
        "a>=",
        "a(>=1",
        "a>=1)",
        "a=1",
        "a>=1;\x00",
        "a\u202e",
        "é",
        "a>=${SECRET}",
        "x" * 501,
        "a --hash=md5:" + "0" * 32,
        "a --hash=sha256:" + "g" * 64,
        "a --hash=sha256:" + "0" * 64 + " -e .",
        "a" + (" --hash=sha256:" + "0" * 64) * 101,
        "--hash=sha256:" + "0" * 64,
    ],
)
def test_what_is_no_plain_requirement_is_refused(written: str) -> None:
    with pytest.raises(Invalid):
        recipe(packages=(written,))


def test_hashes_are_kept_in_one_order_and_belong_to_the_name_of_the_environment() -> None:
    first, second = (f"--hash=sha256:{letter * 64}" for letter in "ab")
    one = recipe(packages=(f"a>=1 {first} {second}",))
    assert one.packages == (f"a>=1 {first} {second}",)
    assert recipe(packages=(f"a >= 1 {second}  {first} {first}",)) == one
    assert environment_name(one) != environment_name(recipe(packages=("a>=1",)))
    many = " ".join(f"--hash=sha256:{number:064x}" for number in range(99))
    with pytest.raises(Invalid, match="leave out hashes"):
        recipe(packages=tuple(f"p{number} {many}" for number in range(50)))


def test_lines_never_come_out_of_one_requirement() -> None:
    (made,) = recipe(packages=("numpy\n>=2\n",)).packages
    assert made == "numpy>=2"
    with pytest.raises(Invalid):
        recipe(packages=("numpy\n-e .",))


def test_nothing_and_a_python_alone_are_the_default() -> None:
    assert (
        environment_name(None)
        == environment_name(Recipe())
        == environment_name(recipe("3.12"))
        == "default"
    )
    assert environment_kind("default") == "default"


def test_an_image_is_named_by_itself() -> None:
    made = recipe(image="registry.test/a/b@sha256:00")
    assert environment_name(made) == "image:registry.test/a/b@sha256:00"
    assert environment_kind(environment_name(made)) == "image"


@pytest.mark.parametrize("python", ["3", "3.12.1", "2.7", "4.0", "python3", "3.123", "", "3.11\n"])
def test_a_python_is_a_minor(python: str) -> None:
    with pytest.raises(Invalid, match="minor version"):
        recipe(python)


def test_too_many_packages_are_refused() -> None:
    with pytest.raises(Invalid, match="at most"):
        recipe(packages=tuple(f"p{n}" for n in range(MAX_PACKAGES + 1)))


@pytest.mark.parametrize("image", ["-x", "a b", "/abs", "a\nb", "x" * 300])
def test_a_bad_image_name_is_refused(image: str) -> None:
    with pytest.raises(Invalid):
        recipe(image=image)
