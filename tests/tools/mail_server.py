"""An SMTP server (RFC 5321 with AUTH PLAIN) in the test's own loop: it keeps the mails it accepts."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from email import message_from_bytes
from email.message import Message


@dataclass
class Mailbox:
    """`refusing`: the answer to every mail. `credentials`: user and password that AUTH must name."""

    credentials: tuple[str, str]
    port: int = 0
    refusing: str = ""
    mails: list[Message] = field(default_factory=list)
    to: list[str] = field(default_factory=list)

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        def say(line: str) -> None:
            writer.write(line.encode() + b"\r\n")

        is_known, to = False, list[str]()
        say("220 test")
        while line := (await reader.readline()).decode().strip():
            verb, _, rest = line.partition(" ")
            match verb.upper():
                case "EHLO":
                    say("250-test")
                    say("250 AUTH PLAIN")
                case "AUTH":
                    _, user, password = base64.b64decode(rest.split(" ")[1]).decode().split("\0")
                    is_known = (user, password) == self.credentials
                    say("235 welcome" if is_known else "535 wrong password")
                case "MAIL":
                    to.clear()
                    say("250 OK" if is_known else "530 sign in first")
                case "RCPT":
                    to.append(rest.partition("<")[2].partition(">")[0])
                    say("250 OK")
                case "DATA":
                    say("354 go on")
                    data = await reader.readuntil(b"\r\n.\r\n")
                    if not self.refusing:
                        self.mails.append(message_from_bytes(data.removesuffix(b".\r\n")))
                        self.to += to
                    say(self.refusing or "250 OK")
                case "QUIT":
                    say("221 bye")
                    break
                case _:
                    say("500 unknown")
        writer.close()


@asynccontextmanager
async def mail_server(user: str, password: str) -> AsyncIterator[Mailbox]:
    box = Mailbox((user, password))
    listening = await asyncio.start_server(box.serve, "127.0.0.1", 0)
    box.port = listening.sockets[0].getsockname()[1]
    try:
        yield box
    finally:
        listening.close()
        await listening.wait_closed()
