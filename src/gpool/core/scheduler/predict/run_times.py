"""Run times predicted from ended tasks: kinds of commands, distributions, estimates. Hints for ordering and backfill; a
restart loses them.

The mean of recent run times of the same user, kind (function, or program and script), requirements and GPU model; with
fewer than three: any model, the user's other scripts of that program, anybody's with the same requirements, all. Not the
median, since run times have heavy tails and the average occupation matters.
One file because kinds and their distributions are one model.
"""

from __future__ import annotations

import re
import shlex
from bisect import bisect_right, insort
from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

from gpool.core.model import Allocation, Node, Requirements, Shape, Span

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


MAX_KINDS = 10_000
_WINDOWS = (50, 200, 500, 2000)  # durations kept, narrowest kind first
_OWN = 3  # longer durations needed to use the narrowest kind alone
_ENOUGH = 8  # and to use a wider kind
_RECENT = 10  # newest durations that replace a kind's window if they differ from it
_CHANGED = 2.0  # times the window's median, either way: the commands of a kind may do something new
_MOST_TIMES = 20.0  # times its age, for a task older than all known ones

_NARROWEST = 4  # members of the narrowest kind: user, group, environment, requirements

Kind = tuple[object, ...]


class _Window:
    __slots__ = ("_order", "_size", "ascending")

    def __init__(self, size: int) -> None:
        self._size = size
        self._order: deque[int] = deque()
        self.ascending: list[int] = []

    def add(self, value: int) -> None:
        if len(self._order) == self._size:
            oldest = self._order.popleft()
            del self.ascending[bisect_right(self.ascending, oldest) - 1]
        self._order.append(value)
        insort(self.ascending, value)

    def current(self) -> list[int]:
        """Durations to expect, ascending: the newest alone if the kind's run time has changed.

        A kind is coarse (`python -c`): its next programs may run a hundred times as long as its last ones.
        """
        newest = sorted(
            self._order[place] for place in range(-_RECENT, 0) if -place <= len(self._order)
        )
        if len(newest) == _RECENT:
            now, ever = newest[_RECENT // 2], self.ascending[len(self.ascending) // 2]
            if now > _CHANGED * ever or ever > _CHANGED * now:
                return newest
        return self.ascending.copy()


class _Longer(NamedTuple):
    """Durations of a kind that exceed an age."""

    ascending: Sequence[int]
    first: int

    @property
    def size(self) -> int:
        return len(self.ascending) - self.first

    @property
    def longest(self) -> int:
        """Of all durations of the kind; 0 without any."""
        return self.ascending[-1] if self.ascending else 0

    def at(self, fraction: float) -> int:
        return self.ascending[self.first + min(int(fraction * self.size), self.size - 1)]


class RunTimes:
    def __init__(self) -> None:
        self._kinds: dict[Kind, _Window] = {}

    def observe(self, shape: Shape, duration: Span) -> None:
        for kind, size in zip(_kinds(shape), _WINDOWS, strict=True):
            window = self._kinds.pop(kind, None) or _Window(size)
            window.add(max(1, duration))
            self._kinds[kind] = window
        while len(self._kinds) > MAX_KINDS:
            del self._kinds[next(iter(self._kinds))]

    @property
    def is_empty(self) -> bool:
        return not self._kinds

    def is_known(self, shape: Shape) -> bool:
        """Whether enough tasks of this user, program, environment and requirements have ended."""
        return self._longer(own_kind(shape), Span(0)).size >= _OWN

    def left(self, shape: Shape, age: Span, fraction: float, oldest_running: int = 0) -> Span:
        """Sample the remaining run time of a task of this age; `fraction` (0 <= fraction < 1) chooses the quantile.

        Each ended task of a kind with fewer than `_OWN` of them has twice the weight of all wider kinds together.
        `oldest_running`: age of the kind's oldest running task. Beyond all of its ended ones, it shows that the kind takes
        longer than others: a task that has not started is then expected to take twice that age at least.
        """
        narrowest, *kinds = _kinds(shape)
        own = self._longer(narrowest, age)
        if own.size >= _OWN:
            return Span(own.at(fraction) - age)
        least = 2 * oldest_running if not age and oldest_running > own.longest else 0
        wider = [self._longer(kind, age) for kind in kinds]
        others = next((each for each in wider if each.size >= _ENOUGH), None)
        others = others or next((each for each in wider if each.size), None)
        weight = 2 * own.size
        position = fraction * (weight + 1)
        if own.size and others is None:
            sampled = own.at(fraction) - age
        elif position < weight:
            sampled = own.at(position / weight) - age
        elif others is not None:
            sampled = others.at(position - weight) - age
        else:
            sampled = round(max(age, 1) * min(_MOST_TIMES, fraction / (1 - fraction))) + 1
        return Span(max(sampled, least))

    def _longer(self, kind: Kind, age: Span) -> _Longer:
        window = self._kinds.get(kind)
        if window is None:
            return _Longer((), 0)
        return _Longer(window.ascending, bisect_right(window.ascending, age))

    def copy(self) -> RunTimes:
        twin = RunTimes()
        for kind, window in self._kinds.items():
            alike = twin._kinds[kind] = _Window(0)
            alike.ascending = (
                window.current() if len(kind) == _NARROWEST else window.ascending.copy()
            )
        return twin


def own_kind(shape: Shape) -> Kind:
    return shape.user, shape.group, shape.environment, shape.requirements


def _kinds(shape: Shape) -> tuple[Kind, ...]:
    asked = shape.requirements.gpu
    return (
        own_kind(shape),
        (shape.user, asked),
        (asked,),
        (),
    )


KEPT = 50
LEAST = 3
MAX_KEYS = 20_000


def model_of(node: Node | None, allocation: Allocation) -> str:
    if node is None or not allocation.slices:
        return ""
    index = allocation.slices[0].gpu_index
    return next((gpu.model for gpu in node.offer.gpus if gpu.index == index), "")


class _Lately:
    __slots__ = ("kept", "total")

    def __init__(self) -> None:
        self.kept: deque[int] = deque()
        self.total = 0

    def add(self, value: int, count: int) -> None:
        for _ in range(min(count, KEPT)):
            if len(self.kept) == KEPT:
                self.total -= self.kept.popleft()
            self.kept.append(value)
            self.total += value


class _HashedRequirements:
    """Requirements hashed once: they are looked up with every task."""

    __slots__ = ("_hash", "needs")

    def __init__(self, needs: Requirements) -> None:
        self.needs = needs
        self._hash = hash(needs)

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _HashedRequirements) and self.needs == other.needs


class Predictions:
    __slots__ = ("_asked", "_seen")

    def __init__(self) -> None:
        self._seen: dict[Kind, _Lately] = {}
        self._asked: dict[int, _HashedRequirements] = {}  # by identity

    def _kinds(self, shape: Shape, model: str) -> tuple[Kind, ...]:
        needs, own = self._needs(shape.requirements), (shape.user, shape.group)
        program = program_of(shape.group)
        wider: tuple[Kind, ...] = ((shape.user, program, needs),) if program != own[1] else ()
        if not model:
            return (*own, needs), *wider, (needs,), ()
        return (*own, needs, model), (*own, needs), *wider, (needs, model), (needs,), ()

    def _needs(self, asked: Requirements) -> _HashedRequirements:
        known = self._asked.get(id(asked))
        if known is None or known.needs is not asked:
            if len(self._asked) >= MAX_KEYS:
                self._asked.clear()
            known = self._asked[id(asked)] = _HashedRequirements(asked)
        return known

    def observe(self, shape: Shape, count: int, total: Span, model: str = "") -> None:
        for kind in self._kinds(shape, model):
            seen = self._seen.pop(kind, None) or _Lately()
            self._seen[kind] = seen  # newest last; the oldest is evicted first
            seen.add(total // count, count)
        while len(self._seen) > MAX_KEYS:
            del self._seen[next(iter(self._seen))]

    def of(self, shape: Shape, model: str = "") -> Span | None:
        if not self._seen:
            return None
        for kind in self._kinds(shape, model):
            seen = self._seen.get(kind)
            if seen is not None and len(seen.kept) >= LEAST:
                return Span(seen.total // len(seen.kept))
        return None
