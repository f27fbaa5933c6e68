"""A package index in a folder, filled with tiny packages made on the spot. Nothing is fetched from anywhere."""

from __future__ import annotations

import hashlib
import io
import tarfile
import zipfile
from collections.abc import Mapping
from pathlib import Path


class PackageIndex:
    """Pages beneath `simple`, files beside them, as mirrors lay them."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.pages = folder / "simple"
        self.files = folder / "files"
        for path in (self.pages, self.files):
            path.mkdir(parents=True)

    @property
    def address(self) -> str:
        return f"file://{self.pages}"

    def wheel(
        self,
        name: str,
        version: str = "1.0",
        *,
        modules: Mapping[str, str] | None = None,
        needs: tuple[str, ...] = (),
        script: str = "",
    ) -> None:
        """A pure package; `modules` are paths and texts, `script` is `command = module:function`."""
        about = f"{name}-{version}.dist-info"
        texts = {f"{name}.py": f"VERSION = {version!r}\n"} if modules is None else dict(modules)
        texts[f"{about}/METADATA"] = metadata(name, version, needs)
        texts[f"{about}/WHEEL"] = WHEEL
        if script:
            texts[f"{about}/entry_points.txt"] = f"[console_scripts]\n{script}\n"
        data = wheel_bytes(texts, about)
        self._add(name, f"{name}-{version}-py3-none-any.whl", data)

    def sdist(self, name: str, backend: str, version: str = "1.0") -> None:
        """A source package whose build runs `backend`: the text of a Python module with PEP 517's functions."""
        top = f"{name}-{version}"
        project = (
            '[build-system]\nrequires = []\nbuild-backend = "backend"\nbackend-path = ["."]\n'
            f'[project]\nname = "{name}"\nversion = "{version}"\n'
        )
        held = io.BytesIO()
        with tarfile.open(fileobj=held, mode="w:gz") as archive:
            for path, text in {
                "pyproject.toml": project,
                "backend.py": backend,
                "PKG-INFO": metadata(name, version, ()),
            }.items():
                entry = tarfile.TarInfo(f"{top}/{path}")
                entry.size = len(text.encode())
                archive.addfile(entry, io.BytesIO(text.encode()))
        self._add(name, f"{top}.tar.gz", held.getvalue())

    def _add(self, name: str, filename: str, data: bytes) -> None:
        (self.files / filename).write_bytes(data)
        page = self.pages / name / "index.html"
        page.parent.mkdir(exist_ok=True)
        link = f'<a href="../../files/{filename}#sha256={hashlib.sha256(data).hexdigest()}">{filename}</a>\n'
        page.write_text((page.read_text() if page.exists() else "<!DOCTYPE html>\n") + link)


WHEEL = "Wheel-Version: 1.0\nGenerator: gpool\nRoot-Is-Purelib: true\nTag: py3-none-any\n"


def metadata(name: str, version: str, needs: tuple[str, ...]) -> str:
    lines = "".join(f"Requires-Dist: {one}\n" for one in needs)
    return f"Metadata-Version: 2.2\nName: {name}\nVersion: {version}\n{lines}"


def wheel_bytes(texts: Mapping[str, str], about: str) -> bytes:
    held = io.BytesIO()
    record = "".join(f"{path},,\n" for path in (*texts, f"{about}/RECORD"))
    with zipfile.ZipFile(held, "w") as archive:
        for path, text in {**texts, f"{about}/RECORD": record}.items():
            archive.writestr(path, text)
    return held.getvalue()
