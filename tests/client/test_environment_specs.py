"""Recipes from words, files and scripts."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from gpool.client.environment_specs import environment_spec
from gpool.core.errors import Invalid
from gpool.core.model import Recipe


def script(folder: Path, text: str) -> Path:
    file = folder / "train.py"
    file.write_text(text)
    return file


def test_asking_for_nothing_is_no_recipe() -> None:
    assert environment_spec() is None


def test_words_become_a_recipe_in_normal_form() -> None:
    assert environment_spec(python="3.12", pip=["Torch >= 2", "numpy"]) == Recipe(
        "3.12", ("numpy", "torch>=2")
    )


def test_an_image_is_a_environment_spec_its_own() -> None:
    assert environment_spec(image="debian:12") == Recipe(image="debian:12")
    with pytest.raises(Invalid, match="image brings its own Python"):
        environment_spec(image="debian:12", pip=["numpy"])


def test_a_requirements_file_is_read_with_comments_continuations_and_others(tmp_path: Path) -> None:
    (tmp_path / "more").mkdir()
    (tmp_path / "more" / "base.txt").write_text("# only a comment\nattrs\n-r ../all.txt\n")
    file = tmp_path / "all.txt"
    file.write_text(
        "numpy>=2  # arrays\n"
        "\n"
        "pandas \\\n"
        "   >=2,\\\n"
        "   <3\n"
        "  # a comment that ends in a backslash \\\n"
        "rich[jupyter] ; python_version < '3.13'\n"
        "-r more/base.txt\n"
        "--requirement=more/base.txt\n"
        "-rmore/base.txt\n"
    )
    recipe = environment_spec(requirements=file)
    assert recipe is not None
    assert recipe.packages == (
        "attrs",
        "numpy>=2",
        "pandas<3,>=2",
        "rich[jupyter]; python_version < '3.13'",
    )


def test_a_locked_file_with_hashes_is_read(tmp_path: Path) -> None:
    """As `uv export` and `pip-compile --generate-hashes` write it."""
    one, other = "a" * 64, "b" * 64
    file = tmp_path / "locked.txt"
    file.write_text(
        "numpy==2.3.1 ; python_version >= '3.11' \\\n"
        f"    --hash=sha256:{other} \\\n"
        f"    --hash=sha256:{one}\n"
        "    # via pandas\n"
    )
    recipe = environment_spec(requirements=file)
    assert recipe is not None
    named = "numpy==2.3.1; python_version >= '3.11'"
    assert recipe.packages == (f"{named} --hash=sha256:{one} --hash=sha256:{other}",)


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("--index-url https://example.test/simple", r"all\.txt:2: '--index-url' is a pip option"),
        ("-e .", "'-e' is a pip option"),
        ("-c limits.txt", "'-c' is a pip option"),
        ("numpy==2.0 --hash=sha256:00", "a hash is --hash=sha256: and 64"),
        ("numpy --no-binary=:all:", "'--no-binary=:all:' is a pip option"),
        ("https://example.test/a.whl", r"all\.txt:2: .* names an address"),
        ("thing @ https://example.test/a.whl", "names an address"),
        ("./here", r"all\.txt:2"),
        ("git+ssh://example.test/a", r"all\.txt:2"),
    ],
)
def test_options_and_addresses_are_refused_with_their_place(
    tmp_path: Path, line: str, says: str
) -> None:
    file = tmp_path / "all.txt"
    file.write_text(f"numpy\n{line}\n")
    with pytest.raises(Invalid, match=says):
        environment_spec(requirements=file)


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(Invalid, match=r"nowhere\.txt' cannot be read"):
        environment_spec(requirements=tmp_path / "nowhere.txt")
    (tmp_path / "binary.txt").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(Invalid, match="not UTF-8"):
        environment_spec(requirements=tmp_path / "binary.txt")


def test_files_nested_without_end_are_refused(tmp_path: Path) -> None:
    for number in range(40):
        (tmp_path / f"{number}.txt").write_text(f"-r {number + 1}.txt\n")
    (tmp_path / "40.txt").write_text("numpy\n")
    with pytest.raises(Invalid, match="files deep"):
        environment_spec(requirements=tmp_path / "0.txt")


def test_a_script_without_a_block_asks_for_nothing(tmp_path: Path) -> None:
    assert environment_spec(script=script(tmp_path, "print(1)\n")) is None


def test_a_scripts_block_is_read(tmp_path: Path) -> None:
    file = script(
        tmp_path,
        "#!/usr/bin/env python\n# /// script\n# dependencies = [\n#   'numpy',\n#\n#   'Rich>=14',\n# ]\n# ///\nprint(1)\n",
    )
    assert environment_spec(script=file) == Recipe(None, ("numpy", "rich>=14"))
    assert environment_spec(script=file, pip=["attrs"], python="3.12") == Recipe(
        "3.12", ("attrs", "numpy", "rich>=14")
    )


def test_a_block_that_is_never_closed_is_a_comment(tmp_path: Path) -> None:
    text = "# /// script\n# dependencies = ['numpy']\n\n# ///\n"
    assert environment_spec(script=script(tmp_path, text)) is None


def test_the_last_close_of_a_run_of_comments_ends_the_block(tmp_path: Path) -> None:
    text = "# /// script\n# dependencies = ['numpy']\n# [tool.x]\n# y = '''\n# ///\n# '''\n# ///\nprint(1)\n"
    assert environment_spec(script=script(tmp_path, text)) == Recipe(None, ("numpy",))


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ("dependencies = 'numpy'", "not a list"),
        ("dependencies = [1]", "not a list"),
        ("dependencies = [", "not TOML"),
        ("dependencies = ['a @ https://example.test/a.whl']", "names an address"),
        ("requires-python = 3", "not text"),
        ("requires-python = 'new'", "write it like"),
        ("requires-python = '<3'", "requires Python '<3'"),
    ],
)
def test_a_bad_block_is_refused(tmp_path: Path, content: str, says: str) -> None:
    with pytest.raises(Invalid, match=says):
        environment_spec(script=script(tmp_path, f"# /// script\n# {content}\n# ///\n"))


def test_two_blocks_are_refused(tmp_path: Path) -> None:
    block = "# /// script\n# dependencies = []\n# ///\n\n"
    with pytest.raises(Invalid, match="2 blocks"):
        environment_spec(script=script(tmp_path, block + block))


OWN = f"3.{sys.version_info.minor}"


@pytest.mark.parametrize(
    ("wanted", "python"),
    [
        (">=3.8", None),
        (">=3.11,<4", None),
        (f">={OWN}.1", OWN if sys.version_info.minor > 11 else None),
        (f"=={OWN}.*", OWN),
        (f"=={OWN}", OWN),
        ("==3.14.*", "3.14"),
        ("~=3.14.2", "3.14"),
        ("~=3.9", None),
        ("<3.12", "3.11"),
        ("!=3.11.*,!=3.12.*,<3.14", OWN if OWN == "3.13" else "3.13"),
        (">3.17", OWN if sys.version_info.minor > 16 else "3.17"),
        ("<=3.11.4", "3.11"),
    ],
)
def test_the_python_a_script_requires_is_asked_for_only_when_not_every_node_has_it(
    tmp_path: Path, wanted: str, python: str | None
) -> None:
    text = f"# /// script\n# requires-python = '{wanted}'\n# dependencies = ['numpy']\n# ///\n"
    assert environment_spec(script=script(tmp_path, text)) == Recipe(python, ("numpy",))
