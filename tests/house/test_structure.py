"""`tests.structure` finds each planted violation, reports nothing on a clean tree, and its list only shrinks."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from tests.structure.__main__ import main
from tests.structure.causes import causes
from tests.structure.limits import ALLOWED, EXEMPT_FOLDERS, problems, violations_of
from tests.structure.measures import measure

METHODS_25 = "".join(f"    def m{n}(self): ...\n" for n in range(25))
ATTRIBUTES_15 = "    def __init__(self):\n" + "".join(f"        self.a{n} = 0\n" for n in range(15))
LONG = '"""{}"""\n' + "x = 1\n" * 401
CLEAN = {
    "gpool/__init__.py": "",
    "gpool/core/base.py": f"class Base:\n{METHODS_25}",
    "gpool/core/few.py": f"class Few:\n{ATTRIBUTES_15}",
    "gpool/core/long.py": LONG.format("Rows. One file because the tables refer to one another."),
    "gpool/server/store/read.py": "def first(rows, row):\n    return rows[0], row.name, row[1:3]\n",
    **{f"gpool/wide/m{n}.py": "" for n in range(12)},
    "gpool/wide/__init__.py": "",
    "gpool/wide/__main__.py": "",
    **{f"{folder}/v{n}.py": "" for folder in EXEMPT_FOLDERS for n in range(30)},
}
DERIVED = "from gpool.core.base import Base\nclass Derived(Base):\n    def more(self): ...\n"
WIDE = "class Wide:\n" + ATTRIBUTES_15 + "    def late(self):\n        self.x, self.y = 1, 2\n"
FIELDS_16 = "".join(f"    f{n}: int = 0\n" for n in range(16))


def plant(tree: Path, files: dict[str, str]) -> Path:
    for name, text in {**CLEAN, **files}.items():
        path = tree / "src" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return tree


def keys(tree: Path) -> list[str]:
    return [violation.key for violation in violations_of(measure(tree))]


def test_a_clean_tree_has_no_violation(tmp_path: Path) -> None:
    assert keys(plant(tmp_path, {})) == []
    assert main(["--tree", str(tmp_path), "--check"]) == 0


@pytest.mark.parametrize(
    ("expected", "files"),
    [
        ("folder gpool/wide", {"gpool/wide/m12.py": ""}),
        ("file-without-reason gpool/core/new.py", {"gpool/core/new.py": LONG.format("Rows.")}),
        (
            "file-too-long gpool/core/new.py",
            {"gpool/core/new.py": '"""Over 400 lines because."""\n' + "x = 1\n" * 600},
        ),
        ("class-name Few", {"gpool/core/new.py": "def make():\n    class Few: ...\n"}),
        ("class-methods Derived", {"gpool/core/new.py": DERIVED}),
        (
            "class-methods Derived",
            {
                "gpool/core/__init__.py": "from gpool.core.base import Base as Root\n",
                "gpool/new.py": "from gpool import core\nclass Derived(core.Root[int]):\n    def more(self): ...\n",
            },
        ),
        ("class-attributes Wide", {"gpool/core/new.py": WIDE}),
        ("class-attributes Wide", {"gpool/new.py": f"@dataclass\nclass Wide:\n{FIELDS_16}"}),
        ("rows-by-position src", {"gpool/server/new.py": "def f(row):\n    return row[7]\n"}),
        (
            "rows-by-position src",
            {"gpool/server/new.py": "def f(task):\n    return task.row[-1]\n"},
        ),
        (
            "rows-by-position src",
            {"gpool/server/store/new.py": "def f(found):\n    return found[0][7]\n"},
        ),
    ],
)
def test_each_planted_violation_is_found(
    tmp_path: Path, expected: str, files: dict[str, str]
) -> None:
    assert keys(plant(tmp_path, files)) == [expected]
    assert main(["--tree", str(tmp_path), "--check"]) == 1


@pytest.mark.parametrize(
    "head",
    [
        "@dataclass(frozen=True, slots=True)\nclass Wide:",
        "class Wide(NamedTuple):",
        "class Wide(msgspec.Struct, frozen=True):",
        "class Wide(BaseModel):",
        "class Wide(BaseSettings):",
        "class Wide(Protocol[T]):",
        "class Wide(enum.StrEnum):",
        "class Wide(ValueError):",
        "class Document(Struct): ...\nclass Wide(Document):",
    ],
)
def test_values_documents_settings_and_errors_are_exempt_from_size(
    tmp_path: Path, head: str
) -> None:
    text = f"{head}\n{FIELDS_16}{METHODS_25}    def one_more(self): ...\n"
    assert keys(plant(tmp_path, {"gpool/core/new.py": text})) == []


def test_a_class_that_implements_a_protocol_is_not_exempt(tmp_path: Path) -> None:
    text = f"class Port(Protocol):\n{METHODS_25}class Adapter(Port):\n    def more(self): ...\n"
    assert keys(plant(tmp_path, {"gpool/core/new.py": text})) == ["class-methods Adapter"]


def test_every_line_is_counted_once_by_its_kind(tmp_path: Path) -> None:
    text = '"""Two words.\n\nThree."""\n\n# a comment here\nx = """\n\n"""  # why\n"""Of x."""\n'
    (tmp_path / "one.py").write_text(text)
    assert measure(tmp_path)["lines"] == {
        "total": 9,
        "code": 3,
        "docstring": 4,
        "comment": 1,
        "blank": 1,
        "docstring_words": 3,
        "attribute_docstring_words": 2,
        "comment_words": 4,
    }


def test_a_listed_violation_passes_until_it_grows_or_is_gone(tmp_path: Path) -> None:
    tree = ["--tree", str(tmp_path)]
    plant(tmp_path, {"gpool/wide/m12.py": "", "gpool/wide/m13.py": ""})
    assert main([*tree, "--accept"]) == 0
    assert json.loads((tmp_path / ALLOWED).read_text()) == {"folder gpool/wide": 14}
    assert main([*tree, "--check"]) == 0
    plant(tmp_path, {"gpool/wide/m14.py": ""})
    assert main([*tree, "--check"]) == 1
    for number in (13, 14):
        (tmp_path / f"src/gpool/wide/m{number}.py").unlink()
    assert main([*tree, "--check"]) == 0, "smaller, and still a violation"
    (tmp_path / "src/gpool/wide/m12.py").unlink()
    allowed = json.loads((tmp_path / ALLOWED).read_text())
    [text] = problems(violations_of(measure(tmp_path)), allowed)
    assert text == f"folder gpool/wide: no longer violated; remove it from {ALLOWED}"
    assert main([*tree, "--check"]) == 1


def test_the_table_compares_with_a_recorded_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recorded = tmp_path / "before.json"
    tree = ["--tree", str(plant(tmp_path, {}))]
    main([*tree, "--json", str(recorded)])
    plant(tmp_path, {"gpool/core/new.py": ""})
    capsys.readouterr()
    main([*tree, "--before", str(recorded)])
    files = len(list((tmp_path / "src").rglob("*.py")))
    printed = capsys.readouterr().out.splitlines()
    assert printed[1].split()[:3] == ["files", str(files - 1), str(files)]


def test_files_are_reported_by_cause(tmp_path: Path) -> None:
    def git(*arguments: str) -> None:
        name = ["-c", "user.name=t", "-c", "user.email=t@example.org"]
        subprocess.run(["git", *name, *arguments], cwd=tmp_path, check=True, capture_output=True)

    def body(word: str) -> str:
        return "".join(f"{word}_value_{n} = compute_{word}({n})\n" for n in range(20))

    git("init", "--quiet")
    plant(tmp_path, {f"gpool/{w}.py": body(w) for w in ("moved", "merged", "gone", "target")})
    git("add", "-A")
    git("commit", "--quiet", "-m", "base")
    git("mv", "src/gpool/moved.py", "src/gpool/core/moved.py")
    git("rm", "--quiet", "src/gpool/merged.py", "src/gpool/gone.py")
    plant(tmp_path, {"gpool/target.py": body("target") + body("merged"), "gpool/new.py": "x = 1\n"})
    git("add", "-A")
    git("commit", "--quiet", "-m", "head")
    assert [line.rsplit(maxsplit=3) for line in causes(tmp_path, "HEAD~1")[1:]] == [
        ["deleted", "1", "20", "0"],
        ["edited in place", "1", "20", "40"],
        ["merged", "1", "20", "0"],
        ["moved", "1", "20", "20"],
        ["new (or merged into)", "1", "0", "1"],
    ]
