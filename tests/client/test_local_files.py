"""Folders to be shipped: what ignore files leave out, judged by git itself, and what is refused."""

from __future__ import annotations

import os
import subprocess
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpool.client.local_files import MAX_FILES, _Walk, left_out, local_files, rules_of, shown_size
from gpool.core.errors import Invalid


def lay(root: Path, files: Mapping[str, str]) -> Path:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


def names(root: Path, **options: object) -> list[str]:
    return [file.path for file in local_files(root, **options)]  # type: ignore[arg-type]


def test_files_come_in_order_with_their_rights_and_sizes(tmp_path: Path) -> None:
    lay(tmp_path, {"b.py": "1", "a/z.sh": "22", "a.txt": ""})
    (tmp_path / "a/z.sh").chmod(0o755)
    found = local_files(tmp_path, to="code/")
    assert [(f.path, f.size_bytes, f.executable) for f in found] == [
        ("code/a.txt", 0, False),
        ("code/a/z.sh", 2, True),
        ("code/b.py", 1, False),
    ]
    assert found[1].source == tmp_path / "a/z.sh"


def test_version_control_caches_and_environments_never_go(tmp_path: Path) -> None:
    lay(
        tmp_path,
        {
            ".git/config": "",
            "x/__pycache__/y.pyc": "",
            ".venv/a": "",
            "my env/pyvenv.cfg": "",
            "my env/bin/python": "",
            "x/node_modules/a.js": "",
            "x/y.py": "",
            ".gpoolignore": "!.git\n!__pycache__\n!.venv\n",
        },
    )
    assert names(tmp_path) == [".gpoolignore", "x/y.py"]


def test_gpoolignore_has_the_last_word_in_its_folder_and_the_caller_everywhere(
    tmp_path: Path,
) -> None:
    lay(
        tmp_path,
        {
            ".gitignore": "*.bin\nsecret\n",
            ".gpoolignore": "!model.bin\n*.log\n/.g*\n",
            "model.bin": "",
            "other.bin": "",
            "a.log": "",
            "sub/b.log": "",
            "sub/.gitignore": "!b.log\n",
            "sub/.keep": "",
            "secret": "",
        },
    )
    assert names(tmp_path) == ["model.bin", "sub/.gitignore", "sub/.keep", "sub/b.log"]
    assert names(tmp_path, ignore=["sub/*", "!.gitignore"]) == [
        ".gitignore",
        "model.bin",
        "sub/.gitignore",
    ]


def test_a_folder_within_a_repository_obeys_the_files_above_it(tmp_path: Path) -> None:
    lay(
        tmp_path,
        {
            ".git/HEAD": "",
            ".gitignore": "/project/data\nproject/src/*.tmp\nproject\n",
            "project/.gitignore": "*.o\n",
            "project/src/a.tmp": "",
            "project/src/a.o": "",
            "project/src/a.c": "",
            "project/data/x": "",
        },
    )
    assert names(tmp_path / "project") == [".gitignore", "src/a.c"]
    assert names(tmp_path / "project" / "src") == ["a.c"]


def test_outside_a_repository_files_above_say_nothing(tmp_path: Path) -> None:
    lay(tmp_path, {".gitignore": "*\n", "project/a": ""})
    assert names(tmp_path / "project") == ["a"]


def test_links_within_are_followed_and_links_out_refused(tmp_path: Path) -> None:
    lay(tmp_path, {"in/a": "1", "outside": "secret"})
    root = tmp_path / "in"
    (root / "b").symlink_to("a")
    assert names(root) == ["a", "b"]
    (root / "out").symlink_to("../outside")
    with pytest.raises(Invalid, match="'out' is a link out of the folder"):
        local_files(root)
    assert names(root, ignore=["out"]) == ["a", "b"]
    (root / "out").unlink()
    (root / "out").symlink_to(tmp_path / "nowhere")
    with pytest.raises(Invalid, match="link to nothing"):
        local_files(root)


def test_linked_folders_are_followed_but_never_in_circles(tmp_path: Path) -> None:
    lay(tmp_path, {"a/x": "", ".git/config": ""})
    (tmp_path / "b").symlink_to("a")
    assert names(tmp_path) == ["a/x", "b/x"]
    (tmp_path / "a/up").symlink_to("..")
    with pytest.raises(Invalid, match="link to a folder it lies in"):
        local_files(tmp_path)
    (tmp_path / "a/up").unlink()
    (tmp_path / "c").symlink_to(".git")
    with pytest.raises(Invalid, match="never shipped"):
        local_files(tmp_path)


def test_special_files_and_twins_are_refused(tmp_path: Path) -> None:
    lay(tmp_path, {"a": "", "A": ""})
    if len(list(tmp_path.iterdir())) == 2:
        with pytest.raises(Invalid, match="differ only in case"):
            local_files(tmp_path)
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(Invalid, match="'pipe' is neither a file nor a folder"):
        names(tmp_path, ignore=["A"])


def test_what_is_no_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(Invalid, match="is not a folder"):
        local_files(tmp_path / "none")
    with pytest.raises(Invalid, match="absolute"):
        local_files(tmp_path, to="/etc")


def test_too_many_files_are_refused_with_their_size(tmp_path: Path) -> None:
    for number in range(MAX_FILES + 1):
        (tmp_path / str(number)).write_bytes(b"x")
    with pytest.raises(Invalid, match=r"more than 10000 files \(10\.0 kB so far\)"):
        local_files(tmp_path)
    assert len(names(tmp_path, ignore=["1"])) == MAX_FILES


def test_sizes_are_shown_for_people() -> None:
    assert [shown_size(n) for n in (0, 999, 1500, 2_500_000, 10**12)] == [
        "0 bytes",
        "999 bytes",
        "1.5 kB",
        "2.5 MB",
        "1.0 TB",
    ]


# ---- git is the judge

PIECES = ["a", "b", "ab", "*", "**", "?", "[ab]", "[!a]", "[^b]", "[a-c]", "[]a]", "[[:alpha:]]"]
PIECES += ["[b-]", "\\a", "\\*", "[a", "[z-a]", "[[:x:]]", "[!a-]", "é", ".", "#", "!", "\\!", " "]
NAMES = ["a", "b", "ab", "ba", "c", "-", "]", "*", "é", "a b", "#a", "!a", ".a", "a.b", "[a"]

segment = st.lists(st.sampled_from(PIECES), min_size=1, max_size=3).map("".join)
pattern = st.builds(
    lambda no, top, parts, end, blank: no + top + "/".join(parts) + end + blank,
    st.sampled_from(["", "", "!"]),
    st.sampled_from(["", "", "/"]),
    st.lists(st.one_of(segment, st.just("**")), min_size=1, max_size=3),
    st.sampled_from(["", "", "/", "/*", "/**"]),
    st.sampled_from(["", "", "", " ", "\\ ", "\r"]),
)
lines = st.lists(st.one_of(pattern, st.just(""), st.just("# x")), max_size=5)
path = st.lists(st.sampled_from(NAMES), min_size=1, max_size=3).map("/".join)


def kept_by_git(root: Path, paths: list[str]) -> set[str]:
    asked = subprocess.run(
        ["git", "-c", "core.excludesFile=", "check-ignore", "--no-index", "-z", "--stdin"],
        cwd=root,
        input="\0".join(paths).encode(),
        capture_output=True,
        check=False,
    )
    assert asked.returncode in (0, 1), asked.stderr
    return set(paths) - set(asked.stdout.decode().split("\0"))


@settings(max_examples=150, deadline=None)
@given(
    top=lines,
    below=st.dictionaries(st.sampled_from(["a", "b", "a/b", "ab"]), lines, max_size=2),
    paths=st.sets(path, min_size=1, max_size=12),
)
def test_git_and_we_always_leave_out_the_same(
    require: Callable[[str], None], top: list[str], below: dict[str, list[str]], paths: set[str]
) -> None:
    require("git")
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        subprocess.run(["git", "init", "-q", "."], cwd=root, check=True)
        files = dict.fromkeys(sorted(paths), "")
        for where, content in below.items():
            files[f"{where}/.gitignore"] = "\n".join(content)
        files[".gitignore"] = "\n".join([*top, ""])
        there: dict[str, str] = {}
        for name, text in files.items():
            target = root / name
            parents = [parent for parent in target.parents if parent != root]
            if target.is_dir() or any(parent.is_file() for parent in parents):
                continue  # a name cannot be a file and a folder
            lay(root, {name: text})
            there[name] = text
        assert set(names(root)) == kept_by_git(root, list(there))


AMONG = (
    ".a",
    ".a/b",
    ".a/b/c",
    ".x/a",
    "a",
    "ab",
    "ab/c",
    "ab/c/d",
    "a/b",
    "a/b/c",
    "a/x/b",
    "aab",
)


STARS = [
    ".**/*",
    ".**/",
    "/.**",
    "/a**",
    "a**/c",
    "/a**/c",
    "a**/b",
    "a/b**",
    "a/b**/c",
    "a\\b**/c",
]
STARS += ["a**\\/c", "**\\/b", "a/**\\/b", "[a]**/c", "a/***", "a***/c", "?**/b", "/.**/**/c"]


@pytest.mark.parametrize("rule", STARS)
def test_two_stars_after_literal_text_match_as_in_git(
    require: Callable[[str], None], tmp_path: Path, rule: str
) -> None:
    """Git strips the literal start of a rule before it matches: stars behind it stand at the start of the rest."""
    require("git")
    rules = rules_of([rule])
    for each in AMONG:
        folders = each.split("/")[:-1]
        above = ["/".join(folders[: n + 1]) for n in range(len(folders))]
        ours = any(left_out([rules], one, folder=True) for one in above)
        ours = ours or left_out([rules], each, folder=False)
        root = tmp_path / each.replace("/", "_")
        lay(root, {".gitignore": f"{rule}\n", each: ""})
        subprocess.run(["git", "init", "-q", "."], cwd=root, check=True)
        assert ours is (not kept_by_git(root, [each])), each


def test_a_name_that_cannot_travel_says_what_to_do(tmp_path: Path) -> None:
    (tmp_path / "family \u200d.png").write_text("")
    with pytest.raises(Invalid, match=r"rename it, or name it in \.gpoolignore"):
        local_files(tmp_path)
    (tmp_path / ".gpoolignore").write_text("*.png\n")
    assert [file.path for file in local_files(tmp_path)] == [".gpoolignore"]


def test_rules_that_cannot_be_read_are_named(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("")
    (tmp_path / ".gpoolignore").symlink_to("/proc/self/mem")  # a file that nobody can read
    with pytest.raises(Invalid, match=r"\.gpoolignore' cannot be read"):
        local_files(tmp_path)


def test_what_goes_away_meanwhile_is_left_out(tmp_path: Path) -> None:
    for name in ("a", "b.swp", "c"):
        (tmp_path / name).write_text("")
    files = _Walk(tmp_path, rules_of(())).files(tmp_path, "", (), (tmp_path,))
    assert next(files).path == "a"
    (tmp_path / "b.swp").unlink()
    assert [file.path for file in files] == ["c"]
