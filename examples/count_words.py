"""Run a command with one input file and one output folder."""

from __future__ import annotations

import tempfile
from pathlib import Path

import gpool

PROGRAM = """
import collections, pathlib
words = pathlib.Path("text.txt").read_text().split()
pathlib.Path("counts").mkdir()
with open("counts/words.txt", "w") as out:
    for word, count in collections.Counter(words).most_common():
        print(count, word, file=out)
print(len(words), "words")
"""

if __name__ == "__main__":
    folder = Path(tempfile.mkdtemp(prefix="words-", dir=Path.cwd())).relative_to(Path.cwd())
    text = folder / "text.txt"
    text.write_text("to be or not to be")
    # An input keeps its path relative to the current folder: the program must use that path.
    program = PROGRAM.replace("text.txt", text.as_posix())
    done = gpool.run(
        ["python", "-c", program], inputs=[text], outputs=["counts/"], into=folder, check=True
    )
    print(done.stdout, end="")
    print((folder / "counts" / "words.txt").read_text(), end="")
    text.unlink()
    (folder / "counts" / "words.txt").unlink()
    (folder / "counts").rmdir()
    folder.rmdir()
