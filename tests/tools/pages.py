"""Blocks of the Markdown pages: fenced and indented code, and the commands in it as a shell reads them."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SHELL = ("", "console", "sh", "bash", "shell")
PARSED_ONLY = ("gpu", "cluster", "chain")
"""Second word of a fence: the block needs a GPU, a cluster or a chain and is never run by a test."""

_FENCE = re.compile(
    r"^(?P<indent> *)```(?P<info>[^\n`]*)\n(?P<text>.*?)^(?P=indent)```", re.M | re.S
)
_INDENTED = re.compile(r"(?:^ {4}\S[^\n]*\n)+", re.M)
_ASSIGNMENT = re.compile(r"[A-Za-z_]\w*=.*")
_KEYWORDS = {"if", "then", "else", "elif", "while", "until", "do", "!", "time", "exec", "sudo"}


@dataclass(frozen=True, slots=True)
class Block:
    page: Path
    line: int
    info: str
    text: str

    @property
    def language(self) -> str:
        return self.info.split()[0] if self.info.split() else ""

    @property
    def is_parsed_only(self) -> bool:
        return any(word in PARSED_ONLY for word in self.info.split()[1:])

    @property
    def name(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}"


def pages() -> list[Path]:
    """Pages for users; decisions and measurements are records of their day."""
    docs = ROOT / "docs"
    found = [ROOT / "README.md", *docs.glob("*.md"), *docs.glob("guides/*.md")]
    return sorted([*found, *docs.glob("tutorials/*.md")])


def blocks(page: Path) -> Iterator[Block]:
    text = page.read_text(encoding="utf-8")
    for found in _FENCE.finditer(text):
        indent = len(found["indent"])
        inner = "\n".join(line[indent:] for line in found["text"].splitlines())
        line = text.count("\n", 0, found.start()) + 1
        yield Block(page, line, found["info"].strip(), inner + "\n")
    outside = _FENCE.sub(lambda found: "\n" * found.group().count("\n"), text)
    for found in _INDENTED.finditer(outside):
        line = outside.count("\n", 0, found.start()) + 1
        yield Block(page, line, "", re.sub(r"(?m)^ {4}", "", found.group()))


def typed_lines(block: Block) -> list[str]:
    """Lines that a person types: those behind `$ ` if there are any, else all; continued lines joined."""
    lines = block.text.replace("\\\n", " ").splitlines()
    prompted = [line[2:] for line in lines if line.startswith("$ ")]
    return prompted or lines


def commands(line: str) -> Iterator[list[str]]:
    """Simple commands of a shell line, without assignments, keywords and redirections. `ValueError`: no shell line."""
    lexer = shlex.shlex(line, posix=True, punctuation_chars="();<>|&")
    lexer.whitespace_split = True
    words: list[str] = []
    for word in [*lexer, ";"]:
        if set(word) <= set("();<>|&"):
            while words and (words[0] in _KEYWORDS or _ASSIGNMENT.fullmatch(words[0])):
                words.pop(0)
            if words:
                yield words
            words = []
        else:
            words.append(word)
