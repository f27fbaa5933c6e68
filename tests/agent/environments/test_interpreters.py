"""The Pythons of a machine: found, told apart, placed inside."""

from __future__ import annotations

import sys
from pathlib import Path

from gpool.agent.environments.interpreters import candidates, find_interpreters, own_interpreter

TALKS = """#!/bin/sh
echo '["{name}", [3, {minor}, {micro}], "{base}", "{prefix}", {shared}]'
"""


def python(
    root: Path,
    minor: int,
    micro: int = 0,
    *,
    name: str = "cpython",
    shared: str = "false",
    prefix: str = "",
) -> Path:
    """A program that answers as an interpreter would."""
    program = root / "bin" / f"python3.{minor}"
    program.parent.mkdir(parents=True, exist_ok=True)
    text = TALKS.format(
        name=name, minor=minor, micro=micro, base=root, prefix=prefix or root, shared=shared
    )
    program.write_text(text)
    program.chmod(0o755)
    return program


def test_our_own_is_always_there() -> None:
    own = own_interpreter()
    found = find_interpreters([])
    assert found == {own.minor: own}
    assert own.minor == f"{sys.version_info.major}.{sys.version_info.minor}"
    assert own.binds == {}


def test_the_latest_of_a_minor_is_taken_and_ours_before_any(tmp_path: Path) -> None:
    programs = [python(tmp_path / f"{n}", 70, n) for n in (1, 3, 2)]
    programs.append(python(tmp_path / "own", sys.version_info.minor, 99))
    found = find_interpreters(programs)
    assert found["3.70"].version == (3, 70, 3)
    assert found[own_interpreter().minor] == own_interpreter()


def test_what_is_old_broken_another_kind_or_a_virtual_environment_is_left_out(
    tmp_path: Path,
) -> None:
    silent = tmp_path / "silent" / "python3.71"
    silent.parent.mkdir()
    silent.write_text("#!/bin/sh\necho nothing\n")
    silent.chmod(0o755)
    programs = [
        python(tmp_path / "old", 8),
        python(tmp_path / "pypy", 72, name="pypy"),
        python(tmp_path / "venv", 73, prefix="/elsewhere"),
        silent,
        tmp_path / "none",
    ]
    assert set(find_interpreters(programs)) == {own_interpreter().minor}


def test_one_with_a_library_of_its_own_stays_at_its_path(tmp_path: Path) -> None:
    found = find_interpreters(
        [python(tmp_path / "a", 70), python(tmp_path / "b", 71, shared="true")]
    )
    plain, shared = found["3.70"], found["3.71"]
    assert plain.program == "/opt/gpool/python3.70/bin/python3.70"
    assert plain.binds == {"/opt/gpool/python3.70": tmp_path / "a"}
    assert shared.program == f"{tmp_path}/b/bin/python3.71"
    assert shared.binds == {f"{tmp_path}/b": tmp_path / "b"}


def test_managed_ones_are_looked_for(tmp_path: Path) -> None:
    one = python(tmp_path / ".local/share/uv/python/cpython-3.70", 70)
    two = python(tmp_path / "pyenv/versions/3.71.0", 71)
    (one.parent / "python3.70-config").write_text("")
    found = list(candidates({"PYENV_ROOT": str(tmp_path / "pyenv")}, tmp_path))
    assert [file for file in found if file.is_relative_to(tmp_path)] == [one, two]
