"""A task's output on a real terminal: shown, never obeyed. The control is the same bytes as the task wrote them."""

from __future__ import annotations

import json
import os
import pty
import re
import subprocess
import sys
import termios

import pytest

OBEYED = re.compile(
    rb"\x1b(?!\[[0-9;:]{0,32}m)|[\x00-\x08\x0b\x0c\x0e-\x1a\x1c-\x1f\x7f]|\xc2[\x80-\x9f]"
)
LOGS = {
    "clipboard": b"\x1b]52;c;ZXZpbA==\x07",
    "link": b"\x1b]8;;http://evil.example\x1b\\good.example\x1b]8;;\x1b\\",
    "title": b"\x1b]0;root@host\x07",
    "title asked back": b"\x1b[21t",
    "cleared screen": b"\x1b[2J\x1b[3J\x1b[H",
    "typed answer": b"\x1b[6n\x1b[c\x1b[5n\x1bZ",
    "device control": b'\x1bP+q544e\x1b\\\x1bP$q"p\x1b\\',
    "application command": b"\x1b_Ga=T;AAAA\x1b\\",
    "privacy message": b"\x1b^x\x1b\\",
    "one character control": "\x9b2J\x9d52;c;eA==\x9c".encode(),
    "one byte control": b"\x9b2J\x9d0;x\x9c",
    "other screen": b"\x1b[?1049h\x1b[?25l\x1b[?2004h",
    "scroll region": b"\x1b[1;3r\x1b7\x1b8\x1bc",
    "printer": b"\x1b[5i evil \x1b[4i",
    "charset": b"\x1b(0lqk\x0e\x0f",
    "keys redefined": b'\x1bP0;1|17/0a\x1b\\\x1b["a"p',
    "picture": b"\x1bPq#0;2;0;0;0~~\x1b\\\x1b]1337;File=inline=1:AA==\x07",
    "bell and backspace": b"\x07\x08\x08\x08\x7f\x00\x05",
    "colour with an odd parameter": b"\x1b[31;?5m\x1b[>4;1m\x1b[0 q",
    "endless colour": b"\x1b[" + b"1;" * 400 + b"m",
    "escape at the end": b"text\x1b",
    "escape within escape": b"\x1b\x1b[\x1b]52;c;eA==\x07",
    "line feeds of other kinds": b"a\x0bb\x0cc\xc2\x85d",
}
SHOW = """
import json, sys
from gpool.cli.printing import LogPrinter
from gpool.client.runs import Printed
data = bytes.fromhex(sys.argv[1])
step = int(sys.argv[2])
if step < 0:
    sys.stdout.buffer.write(data)
else:
    import codecs
    decode = codecs.getincrementaldecoder("utf-8")("replace").decode
    cuts = [data[at : at + step] for at in range(0, len(data), step)]
    LogPrinter().show(Printed(n, "stdout", piece, decode(piece)) for n, piece in enumerate(cuts))
"""


def on_terminal(data: bytes, step: int) -> bytes:
    ours, theirs = pty.openpty()
    settings = termios.tcgetattr(theirs)
    settings[1] &= ~termios.OPOST
    termios.tcsetattr(theirs, termios.TCSANOW, settings)
    words = [sys.executable, "-c", SHOW, data.hex(), str(step)]
    with subprocess.Popen(words, stdin=subprocess.DEVNULL, stdout=theirs) as showing:
        os.close(theirs)
        shown = b""
        while True:
            try:
                more = os.read(ours, 65536)
            except OSError:  # the last of the other side is closed
                break
            if not more:
                break
            shown += more
    os.close(ours)
    assert showing.returncode == 0
    return shown


@pytest.mark.parametrize("step", [1, 7, 100_000])
def test_no_log_ever_commands_a_terminal(step: int) -> None:
    together = b"\n".join(name.encode() + b": " + data for name, data in LOGS.items()) + b"\nend\n"
    shown = on_terminal(together, step)
    assert OBEYED.findall(shown) == []
    assert all(name.encode() in shown for name in LOGS)
    assert shown.endswith(b"end\n")


def test_the_same_logs_as_written_would() -> None:
    raw = on_terminal(b"\n".join(LOGS.values()), -1)
    assert len(OBEYED.findall(raw)) > len(LOGS)
    assert json.dumps(raw.decode("latin-1")).count("\\u001b]52") >= 2
