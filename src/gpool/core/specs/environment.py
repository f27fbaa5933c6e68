"""Environment specs in normal form and their names: "default", "pip:<digest>" or "image:<reference>". Builds nothing.
The name is part of the task's shape: tasks of one environment are interchangeable.
"""

from __future__ import annotations

import hashlib
import re

from gpool.core.errors import Invalid
from gpool.core.model import Recipe

DEFAULT = "default"
PIP, IMAGE = "pip", "image"
MAX_PACKAGES = 500

_REQUIREMENT = re.compile(r"([A-Za-z0-9](?:[A-Za-z0-9._-]*[A-Za-z0-9])?)\s*(.*)", re.DOTALL)
_CLAUSES = (
    r"(?:===|~=|[=!<>]=|[<>])[A-Za-z0-9._*+!-]+(?:,(?:===|~=|[=!<>]=|[<>])[A-Za-z0-9._*+!-]+)*,?"
)
_SPECIFIER = re.compile(rf"(?:\[([A-Za-z0-9._,-]*)\])?(?:({_CLAUSES})|\(({_CLAUSES})\))?")
_MARKER = re.compile(r"""[\w\s.'"<>=!~(),+*-]+""", re.ASCII)
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
    return Recipe(python, tuple(sorted({_normal(one) for one in packages})), image)


def _normal(requirement: str) -> str:
    text = " ".join(requirement.split())
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
    folded = re.sub(r"[-_.]+", "-", name).lower()
    whole = folded + (f"[{extras}]" if extras else "") + clauses
    return whole + (f"; {marker.strip()}" if semicolon else "")


def _no_requirement(text: str) -> Invalid:
    return Invalid(f"{text[:60]!r} is not a package requirement; write numpy or 'numpy>=2'")


def name_of(recipe: Recipe | None) -> str:
    if recipe is None or recipe == Recipe():
        return DEFAULT
    if recipe.image:
        return f"{IMAGE}:{recipe.image}"
    if not recipe.packages:
        return DEFAULT  # a Python alone is a placement constraint
    told = "\n".join([recipe.python or "", *recipe.packages])
    return f"{PIP}:{hashlib.sha256(told.encode()).hexdigest()}"


def kind_of(name: str) -> str:
    """The kind a node must be able to build: "pip", "image", or the name itself."""
    return name.partition(":")[0]
