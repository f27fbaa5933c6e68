"""Texts of a task's or node's spec: environments, labels, file names, prices."""

from __future__ import annotations

import hashlib
import re
import unicodedata
from collections.abc import Callable, Collection, Iterable
from decimal import Decimal, InvalidOperation

from gpool.core.errors import Invalid
from gpool.core.model import Recipe

MAX_LABELS = 50
MAX_LETTERS = 63
_LABEL = re.compile(r"[a-z0-9][a-z0-9._/-]{0,62}(?:=[A-Za-z0-9._/-]{1,63})?")


def checked_label(label: str) -> str:
    """Return the label or raise `Invalid`. Examples: `ssd`, `zone=a`, `example.org/rack=7`."""
    if _LABEL.fullmatch(label) is None:
        raise Invalid(
            f"{label[:80]!r} is not a label; write a word like ssd, or name=value like zone=a: the name in lower-case "
            f"letters, digits and . _ / -, each part at most {MAX_LETTERS} letters"
        )
    return label


_PROJECT = re.compile(r"[A-Za-z0-9][A-Za-z0-9._/-]{0,62}")


def checked_project(label: str) -> str:
    """Return the project label or raise `Invalid`. Examples: `thesis`, `lab/vision-2026`."""
    if _PROJECT.fullmatch(label) is None:
        raise Invalid(
            f"{label[:80]!r} is not a project; write a word like thesis or lab/vision-2026: letters, digits and "
            f". _ / -, the first one a letter or digit, at most {MAX_LETTERS}"
        )
    return label


def normal_labels(labels: Iterable[str]) -> tuple[str, ...]:
    found = tuple(sorted({checked_label(label) for label in labels}))
    if len(found) > MAX_LABELS:
        raise Invalid(f"there are {len(found)} labels; at most {MAX_LABELS} can be given")
    return found


CERTIFIED = "certified:"
"""Prefix of labels that an operator vouches for. Owners cannot give them: their labels have no colon."""


def requested_labels(labels: Collection[str]) -> tuple[str, ...]:
    """Labels that a task asks for: `ssd` (its owner's word) or `certified:ssd` (an operator's)."""
    certified = {label.removeprefix(CERTIFIED) for label in labels if label.startswith(CERTIFIED)}
    plain = normal_labels(label for label in labels if not label.startswith(CERTIFIED))
    found = (*plain, *(CERTIFIED + label for label in normal_labels(certified)))
    if len(found) > MAX_LABELS:
        raise Invalid(f"there are {len(found)} labels; at most {MAX_LABELS} can be given")
    return tuple(sorted(found))


def with_certified(labels: frozenset[str], certified: frozenset[str]) -> frozenset[str]:
    """Labels of a node: its owner's, and the certified ones with their prefix."""
    if not certified and not any(label.startswith(CERTIFIED) for label in labels):
        return labels
    own = {label for label in labels if not label.startswith(CERTIFIED)}
    return frozenset(own | {CERTIFIED + label for label in certified})


MAX_PATH_BYTES = 1024
MAX_NAME_BYTES = 255
_INVISIBLE = {"Cc", "Cf", "Cs", "Zl", "Zp"}  # controls, bidi marks, surrogates, line separators


def checked_path(path: str, *, directory: bool = False) -> str:
    """Raises `Invalid` if the path is not safe beneath a work directory."""
    body = path.removesuffix("/") if directory else path
    shown = path[:80].encode("unicode_escape").decode()
    if not body:
        raise Invalid("an empty path; name a file beneath the work directory")
    if body.startswith("/"):
        raise Invalid(f"path '{shown}' is absolute; give it relative to the work directory")
    # isprintable() first: stricter, and 100 times faster for tasks with thousands of files
    if not body.isprintable() and any(unicodedata.category(c) in _INVISIBLE for c in body):
        raise Invalid(f"path '{shown}' contains a control or invisible character")
    encoded = body.encode()
    if len(encoded) > MAX_PATH_BYTES:
        raise Invalid(f"path '{shown}…' is longer than {MAX_PATH_BYTES} bytes")
    for name in body.split("/"):
        if name in ("", ".", ".."):
            raise Invalid(f"path '{shown}' contains {name!r}; use plain names joined by '/'")
        if len(name.encode()) > MAX_NAME_BYTES:
            raise Invalid(f"a name in path '{shown}…' is longer than {MAX_NAME_BYTES} bytes")
    return path


def asked_for(outputs: Iterable[str]) -> Callable[[str], bool]:
    """Predicate: a requested output or beneath a requested directory. A node must not choose where a consumer writes files, so
    other outputs are never fetched.
    """
    names = {name.removesuffix("/") for name in outputs}

    def is_asked_for(path: str) -> bool:
        cuts = (at for at, letter in enumerate(path) if letter == "/")
        return path in names or any(path[:at] in names for at in cuts)

    return is_asked_for


def folded_path(path: str) -> str:
    """Name on a case-insensitive file system: two outputs must not fold to one."""
    return unicodedata.normalize("NFC", path).casefold()


CREDIT = 1_000_000
"""Micro-credits."""

MAX_PRICE = 1_000_000 * CREDIT


def parse_price(price: str | int | float) -> int:
    """Parse `0.40/h`, `0.40` or `2` to micro-credits per hour."""
    text = str(price).strip().lower().removesuffix("/h").strip()
    try:
        credits = Decimal(text)
    except InvalidOperation:
        raise _wrong(price, "is not a price") from None
    if not credits.is_finite():
        raise _wrong(price, "is not a price")
    if credits < 0:
        raise _wrong(price, "is below zero")
    if credits > MAX_PRICE // CREDIT:  # checked before the multiplication, which could overflow
        raise _wrong(price, f"is more than {MAX_PRICE // CREDIT} credits per hour")
    found = credits * CREDIT
    if found != int(found):
        raise _wrong(price, "is finer than a millionth of a credit")
    return int(found)


def format_price(microcredits: int) -> str:
    whole, rest = divmod(microcredits, CREDIT)
    digits = f"{rest:06d}".rstrip("0").ljust(2, "0")
    return f"{whole}.{digits}/h"


def _wrong(price: object, why: str) -> Invalid:
    return Invalid(f"the price {str(price)[:40]!r} {why}; write credits per hour, like 0.40/h")


DEFAULT_ENVIRONMENT = "default"
PIP_ENVIRONMENT, IMAGE_ENVIRONMENT = "pip", "image"
MAX_PACKAGES = 500
MAX_HASHES = 100  # of one requirement
MAX_REQUIREMENT_BYTES = 8000  # with its hashes
MAX_PACKAGES_BYTES = 256 * 1024

_REQUIREMENT = re.compile(r"([A-Za-z0-9](?:[A-Za-z0-9._-]*[A-Za-z0-9])?)\s*(.*)", re.DOTALL)
_CLAUSES = (
    r"(?:===|~=|[=!<>]=|[<>])[A-Za-z0-9._*+!-]+(?:,(?:===|~=|[=!<>]=|[<>])[A-Za-z0-9._*+!-]+)*,?"
)
_SPECIFIER = re.compile(rf"(?:\[([A-Za-z0-9._,-]*)\])?(?:({_CLAUSES})|\(({_CLAUSES})\))?")
_MARKER = re.compile(r"""[\w\s.'"<>=!~(),+*-]+""", re.ASCII)
_HASH = re.compile(r"--hash=(sha256:[0-9a-f]{64}|sha384:[0-9a-f]{96}|sha512:[0-9a-f]{128})")
_MINOR = re.compile(r"3\.\d{1,2}")
_IMAGE = re.compile(r"[a-z0-9][\w./:@-]{0,254}", re.ASCII | re.IGNORECASE)


def recipe(python: str | None = None, packages: tuple[str, ...] = (), image: str = "") -> Recipe:
    """`Invalid` names the offending word."""
    if python is not None and not _MINOR.fullmatch(python):
        raise Invalid(f"python {python[:20]!r} is not a minor version; write it like 3.12")
    if image and (python or packages):
        raise Invalid("an image brings its own Python; leave out 'python' and 'pip', or the image")
    if image and not _IMAGE.fullmatch(image):
        raise Invalid(f"{image[:60]!r} is not an image name; write it like debian@sha256:…")
    if len(packages) > MAX_PACKAGES:
        raise Invalid(f"{len(packages)} packages; at most {MAX_PACKAGES}")
    normal = tuple(sorted({_normal(one) for one in packages}))
    total = sum(len(one) for one in normal)
    if total > MAX_PACKAGES_BYTES:
        raise Invalid(
            f"the packages and their hashes take {total} bytes; at most {MAX_PACKAGES_BYTES}: "
            "leave out hashes of files for other platforms"
        )
    return Recipe(python, normal, image)


def _normal(requirement: str) -> str:
    """Return the requirement in one spelling, hashes last. A hash only narrows the choice of files."""
    text, *hashes = re.split(r" (?=--hash=)", " ".join(requirement.split()))
    if len(hashes) > MAX_HASHES or not all(_HASH.fullmatch(one) for one in hashes):
        raise Invalid(
            f"{requirement[:60]!r}: a hash is --hash=sha256: and 64 hexadecimal digits, at most {MAX_HASHES} of them"
        )
    found = _REQUIREMENT.fullmatch(text)
    if found is None or len(text) > 500 or not text.isprintable():
        raise _no_requirement(requirement)
    name, rest = found[1], found[2]
    if rest.startswith("@") or "://" in rest:
        raise Invalid(
            f"{requirement[:60]!r} names an address; packages come from the node's own index, "
            "and your own code travels with --workdir"
        )
    specifier, semicolon, marker = rest.partition(";")
    told = _SPECIFIER.fullmatch(re.sub(r"\s+", "", specifier))
    if told is None or (semicolon and not _MARKER.fullmatch(marker.strip())):
        raise _no_requirement(requirement)
    extras = ",".join(sorted({one for one in (told[1] or "").split(",") if one}))
    clauses = ",".join(sorted(one for one in (told[2] or told[3] or "").split(",") if one))
    folded_path = re.sub(r"[-_.]+", "-", name).lower()
    whole = folded_path + (f"[{extras}]" if extras else "") + clauses
    whole += f"; {marker.strip()}" if semicolon else ""
    return " ".join([whole, *sorted(set(hashes))])


def _no_requirement(text: str) -> Invalid:
    return Invalid(f"{text[:60]!r} is not a package requirement; write numpy or 'numpy>=2'")


def environment_name(recipe: Recipe | None) -> str:
    if recipe is None or recipe == Recipe():
        return DEFAULT_ENVIRONMENT
    if recipe.image:
        return f"{IMAGE_ENVIRONMENT}:{recipe.image}"
    if not recipe.packages:
        return DEFAULT_ENVIRONMENT  # a Python alone is a placement constraint
    told = "\n".join([recipe.python or "", *recipe.packages])
    return f"{PIP_ENVIRONMENT}:{hashlib.sha256(told.encode()).hexdigest()}"


def environment_kind(name: str) -> str:
    """The kind a node must be able to build: "pip", "image", or the name itself."""
    return name.partition(":")[0]
