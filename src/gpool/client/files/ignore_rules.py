"""Ignore rules with git's syntax and semantics, matched against relative paths with '/'. Opens no file.

The last matching line decides; lines of a deeper file come after those above it; a file in an ignored folder cannot be
included again.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

_CLASSES = {
    "alnum": "0-9A-Za-z",
    "alpha": "A-Za-z",
    "blank": r" \t",
    "cntrl": r"\x00-\x1f\x7f",
    "digit": "0-9",
    "graph": r"\x21-\x7e",
    "lower": "a-z",
    "print": r"\x20-\x7e",
    "punct": r"!-/:-@\[-`{-~",
    "space": r" \t\r\n\v\f",
    "upper": "A-Z",
    "xdigit": "0-9A-Fa-f",
}


@dataclass(frozen=True, slots=True)
class IgnoreRule:
    """`keeps`: a line with `!`, which includes the path again."""

    pattern: re.Pattern[str]
    keeps: bool
    only_folders: bool
    by_name: bool  # a line without a slash matches names at any depth


@dataclass(frozen=True, slots=True)
class IgnoreRules:
    """`base`: path of the folder ("" for the top); `lead`: prefix of paths if it lies above the top ("project/src/")."""

    rules: tuple[IgnoreRule, ...]
    base: str = ""
    lead: str = ""

    def leaves_out(self, path: str, *, folder: bool) -> bool | None:
        """None if no line matches."""
        below = _bytewise(self.lead + (path[len(self.base) + 1 :] if self.base else path))
        name = below.rpartition("/")[2]
        for rule in reversed(self.rules):
            if rule.only_folders and not folder:
                continue
            if rule.pattern.fullmatch(name if rule.by_name else below):
                return not rule.keeps
        return None


def rules_of(lines: Iterable[str], base: str = "", lead: str = "") -> IgnoreRules:
    parsed = (_rule(line) for line in lines)
    return IgnoreRules(tuple(rule for rule in parsed if rule is not None), base, lead)


def left_out(stack: Iterable[IgnoreRules], path: str, *, folder: bool) -> bool:
    """Whether the first of `stack` with a matching line (deepest folder first) ignores the path."""
    for rules in stack:
        verdict = rules.leaves_out(path, folder=folder)
        if verdict is not None:
            return verdict
    return False


def _bytewise(text: str) -> str:
    """One character per byte: git matches bytes, so `?` is half an é."""
    return text.encode("utf-8", "surrogateescape").decode("latin-1")


def _rule(line: str) -> IgnoreRule | None:
    text = _trimmed(_bytewise(line.removesuffix("\r")))
    if not text or text.startswith("#"):
        return None
    keeps = text.startswith("!")
    text = text[1:] if keeps else text
    only_folders = text.endswith("/")
    text = text[:-1] if only_folders else text
    by_name = "/" not in text
    text = text.removeprefix("/")
    expression = _expression(text) if text else None
    return None if expression is None else IgnoreRule(expression, keeps, only_folders, by_name)


def _trimmed(text: str) -> str:
    end = len(text)
    while end and text[end - 1] == " ":
        slashes = end - 1
        while slashes and text[slashes - 1] == "\\":
            slashes -= 1
        if (end - 1 - slashes) % 2:
            break
        end -= 1
    return text[:end]


def _expression(text: str) -> re.Pattern[str] | None:
    """None if nothing can match (open bracket, trailing backslash)."""
    out, at = [], 0
    literal = next((n for n, char in enumerate(text) if char in "*?[\\"), len(text))
    while at < len(text):
        char = text[at]
        if char == "*":
            end = at
            while end < len(text) and text[end] == "*":
                end += 1
            piece, at = _stars(text, at, end, literal)
            out.append(piece)
        elif char == "?":
            out.append("[^/]")
            at += 1
        elif char == "[":
            found = _bracket(text, at + 1)
            if found is None:
                return None
            out.append(found[0])
            at = found[1]
        elif char == "\\":
            if at + 1 == len(text):
                return None
            out.append(re.escape(text[at + 1]))
            at += 2
        else:
            out.append(re.escape(char))
            at += 1
    return re.compile("".join(out), re.DOTALL)


def _stars(text: str, start: int, end: int, literal: int) -> tuple[str, int]:
    """Translate `text[start:end]`: two stars that fill a path segment match any number of folders, others one name.

    Git compares the rule's first `literal` characters itself and matches only the rest as a pattern. Stars right behind
    them therefore start a segment: `.**/*` matches `.a/b/c`, and `.a` too.
    """
    opens = start in (0, literal) or text[start - 1] == "/"
    if end - start >= 2 and opens:
        if end == len(text) or text.startswith("\\/", end):
            return ".*", end
        if text[end] == "/":
            return "(?:.*/)?", end + 1
    return "[^/]*", end


def _bracket(text: str, at: int) -> tuple[str, int] | None:
    negated = text[at : at + 1] in ("!", "^") and at < len(text)
    at += negated
    parts: list[str] = []
    first = True
    while True:
        if at >= len(text):
            return None
        if text[at] == "]" and not first:
            break
        first = False
        if text.startswith("[:", at):
            end = text.find(":]", at + 2)
            if end >= 0 and "]" not in text[at + 2 : end]:
                known = _CLASSES.get(text[at + 2 : end])
                if known is None:
                    return None
                parts.append(known)
                at = end + 2
                continue
        low = _member(text, at)
        if low is None:
            return None
        char, at = low
        if text[at : at + 1] == "-" and text[at + 1 : at + 2] not in ("]", ""):
            high = _member(text, at + 1)
            if high is None:
                return None
            top, at = high
            parts.extend([f"{re.escape(char)}-{re.escape(top)}"] if char <= top else [])
        else:
            parts.append(re.escape(char))
    inside = "".join(parts)
    if negated:
        return f"(?!/)[^{inside}]" if inside else "[^/]", at + 1
    return (f"(?!/)[{inside}]" if inside else "(?!)"), at + 1


def _member(text: str, at: int) -> tuple[str, int] | None:
    if text[at] == "\\":
        return (text[at + 1], at + 2) if at + 1 < len(text) else None
    return text[at], at + 1
