"""Kind of a command (program and script), to separate run times. Runs nothing and reads no files.
`python train.py --lr 1` and `/opt/bin/python3.12 -u src/train.py` are one kind. Launchers (`env`, `uv run`, `bash -c`),
options and long numbers (`job_0017.py`) are ignored. A wrong guess only widens a kind.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence

MAX_LETTERS = 120
"""Length of a kind."""

_MAX_WORDS = 256  # words of a command that are examined
_MAX_TEXT, _MAX_IN_TEXT = (
    1000,
    32,
)  # letters of a shell text, words of a command in it
_MAX_DEPTH = 8  # nested launchers
_NUMBER = re.compile(r"\d{3,}")
_VERSION = "0123456789."  # letters of a version
_ASSIGNED = re.compile(r"\w+=")
_ENDS = frozenset(("&&", "||", ";", "|", "&", "(", ")", "{", "}"))
_SHELLS = frozenset(("sh", "bash", "dash", "zsh", "ksh", "ash"))
_PREPARES = frozenset(("cd", "export", "source", ".", "set", "ulimit", "umask", "mkdir", "echo"))

_INTERPRETERS = {  # with their options that take a value
    "python": frozenset(("-W", "-X", "--check-hash-based-pycs")),
    "pypy": frozenset(("-W", "-X")),
    "bash": frozenset(("-o", "-O")),
    "sh": frozenset(("-o",)),
    "dash": frozenset(("-o",)),
    "zsh": frozenset(("-o",)),
    "ksh": frozenset(("-o",)),
    "ash": frozenset(("-o",)),
    "node": frozenset(("-r", "--require", "--import")),
    "perl": frozenset(("-I",)),
    "ruby": frozenset(("-I", "-r")),
    "Rscript": frozenset[str](),
    "julia": frozenset(("-t", "-p", "-J", "--project")),
}
_LAUNCHERS = frozenset(("torchrun", "deepspeed", "accelerate", "horovodrun", "mpirun", "mpiexec"))
_LAUNCHING_MODULES = frozenset(("torch.distributed.run", "torch.distributed.launch"))
_PASSES_ON = {  # launchers, with their options that take a value
    "env": frozenset(("-u", "--unset", "-C", "--chdir")),
    "nice": frozenset(("-n", "--adjustment")),
    "ionice": frozenset(("-c", "-n", "--class", "--classdata")),
    "timeout": frozenset(("-k", "-s", "--kill-after", "--signal")),
    "stdbuf": frozenset(("-i", "-o", "-e")),
    "nohup": frozenset[str](),
    "setsid": frozenset[str](),
    "exec": frozenset(("-a",)),
    "time": frozenset(("-f", "-o")),
    "numactl": frozenset[str](),
    "xvfb-run": frozenset(("-s", "-n")),
}
_RUNS = {  # launchers with a subcommand, like `uv run`
    "uv": frozenset(
        [
            "-p",
            "--python",
            "--with",
            "--with-editable",
            "--with-requirements",
            "--extra",
            "--group",
            "--no-group",
            "--package",
            "--project",
            "--directory",
            "--env-file",
            "--index",
            "--index-url",
            "--default-index",
            "--cache-dir",
        ]
    ),
    "poetry": frozenset(("-C", "--directory", "-P", "--project")),
    "pipenv": frozenset[str](),
    "pdm": frozenset(("-p", "--project")),
    "hatch": frozenset(("-e", "--env")),
    "conda": frozenset(("-n", "--name", "-p", "--prefix", "--cwd")),
    "mamba": frozenset(("-n", "--name", "-p", "--prefix", "--cwd")),
    "micromamba": frozenset(("-n", "--name", "-p", "--prefix", "--cwd")),
}


def kind_of(command: Sequence[str]) -> str:
    """Return `program` or `program script`."""
    return _kind(list(command[:_MAX_WORDS]), _MAX_DEPTH)[:MAX_LETTERS]


def program_of(kind: str) -> str:
    return kind.partition(" ")[0]


def _kind(words: list[str], depth: int) -> str:
    while words and _ASSIGNED.match(words[0]):
        words = words[1:]
    if not words:
        return ""
    name, rest = _name(words[0]), words[1:]
    inner = _started(name, rest) if depth else []
    if inner:
        return _kind(inner, depth - 1) or name
    if name in _LAUNCHERS:
        return f"{name} {_script_among(rest)}".rstrip()
    if name in _INTERPRETERS:
        return f"{name} {_script(name, rest)}".rstrip()
    if name.endswith((".py", ".sh")):
        return f"{'python' if name.endswith('.py') else 'sh'} {_plain(name)}"
    return name


def _started(name: str, rest: list[str]) -> list[str]:
    if name in _PASSES_ON:
        after = _after_options(rest, _PASSES_ON[name])
        while name == "env" and after and _ASSIGNED.match(after[0]):
            after = after[1:]
        return after[1:] if name == "timeout" else after
    if name in _RUNS:
        after = _after_options(rest, _RUNS[name])
        return _after_options(after[1:], _RUNS[name]) if after[:1] == ["run"] else []
    if name in _SHELLS:
        return _first_in(_text_of(rest))
    return []


def _after_options(words: list[str], with_word: frozenset[str]) -> list[str]:
    place = 0
    while place < len(words) and words[place].startswith("-"):
        if words[place] == "--":
            return words[place + 1 :]
        place += 2 if words[place] in with_word else 1
    return words[place:]


def _text_of(rest: list[str]) -> str:
    for place, word in enumerate(rest):
        if not word.startswith("-"):
            return ""
        if _has_text(word):
            return next(iter(rest[place + 1 :]), "")
    return ""


def _has_text(option: str) -> bool:
    return not option.startswith("--") and "c" in option


def _first_in(text: str) -> list[str]:
    reader = shlex.shlex(text[:_MAX_TEXT].replace("\n", " ; "), posix=True, punctuation_chars=True)
    reader.commenters = ""
    found: list[str] = []
    try:
        for word in reader:
            if word not in _ENDS and not set(word) <= set("();<>|&"):
                found.append(word)
            elif _does_more(found):
                break
            else:
                found = []
            if len(found) == _MAX_IN_TEXT:
                break
    except ValueError:
        return []
    return found if _does_more(found) else []


def _does_more(words: list[str]) -> bool:
    named = [word for word in words if not _ASSIGNED.match(word)]
    return bool(named) and named[0] not in _PREPARES


def _script(name: str, rest: list[str]) -> str:
    with_word, place = _INTERPRETERS[name], 0
    while place < len(rest) and rest[place].startswith("-") and rest[place] != "-":
        option, after = rest[place], rest[place + 1 :]
        if option == "--":
            place += 1
            break
        if option == "-m" and name in ("python", "pypy"):
            module = next(iter(after), "")
            if module in _LAUNCHING_MODULES:
                return f"-m {_plain(module)} {_script_among(after[1:])}".rstrip()
            return f"-m {_plain(module)}".rstrip()
        if option in ("-c", "-e", "-E", "--eval"):
            return option
        if name in _SHELLS and _has_text(option):
            return "-c"
        place += 2 if option in with_word else 1
    return _plain(rest[place].rpartition("/")[2]) if place < len(rest) else ""


def _script_among(rest: list[str]) -> str:
    for place, word in enumerate(rest):
        if word in ("-m", "--module") and place + 1 < len(rest):
            return f"-m {_plain(rest[place + 1])}"
        if word.endswith((".py", ".sh")) and not word.startswith("-"):
            return _plain(word.rpartition("/")[2])
    return ""


def _name(word: str) -> str:
    name = _plain_word(word.rpartition("/")[2] or word)
    bare = name.rstrip(_VERSION)
    return bare if bare in _INTERPRETERS else name


def _plain(word: str) -> str:
    return _NUMBER.sub("#", _plain_word(word))


def _plain_word(word: str) -> str:
    return "_".join(word.split()) or "_"
