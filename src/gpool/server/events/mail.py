"""Mails of events: plain text, one mail for all events that are due for an address. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from email.message import EmailMessage

from gpool.core.terminal import plain
from gpool.server.events.webhooks import line_of
from gpool.wire.events import PoolEvent

SUBJECT_LETTERS = 120


def event_mail(sender: str, to: str, events: Sequence[PoolEvent], origin: str) -> EmailMessage:
    """Mail with one line for each event. The Message-ID derives from the newest one, so a repeated mail is recognised."""
    lines = [plain(line_of(event)).replace("\n", " ") for event in events]
    more = f" and {len(lines) - 1} more" if len(lines) > 1 else ""
    mail = _mail(sender, to, f"gpool: {lines[0][:SUBJECT_LETTERS]}{more}")
    mail["Message-ID"] = f"<{events[-1].id}.{len(events)}@gpool.invalid>"
    times = [event.timestamp.strftime("%Y-%m-%d %H:%M:%S UTC") for event in events]
    body = [f"{at}  {line}" for at, line in zip(times, lines, strict=True)]
    body += ["", f"Sent by the pool {origin}.", "Change or end these mails: gpool notify ls"]
    mail.set_content("\n".join(body) + "\n")
    return mail


def code_mail(sender: str, to: str, name: str, code: str, origin: str) -> EmailMessage:
    """Mail that confirms an address."""
    mail = _mail(sender, to, "gpool: confirm this address")
    mail.set_content(
        f"The user {plain(name)} of the pool {origin} wants mails about events at this address.\n\n"
        f"Code: {code}\n\nConfirm it with: gpool notify confirm ID {code}\n\n"
        "If you do not know of this, ignore this mail: nothing else is sent.\n"
    )
    return mail


def reset_mail(sender: str, to: str, name: str, link: str, minutes: int) -> EmailMessage:
    """Mail with the link that sets a new password."""
    mail = _mail(sender, to, "gpool: set a new password")
    mail.set_content(
        f"A new password was asked for the account {plain(name)}. Set it here:\n\n{link}\n\n"
        f"The link works once, for {minutes} minutes, and ends all sessions of the account.\n"
        "If you did not ask for it, ignore this mail: the password stays as it is.\n"
    )
    return mail


def _mail(sender: str, to: str, subject: str) -> EmailMessage:
    mail = EmailMessage()
    mail["From"], mail["To"] = sender, to
    mail["Subject"] = " ".join(subject.split())
    mail["Auto-Submitted"] = "auto-generated"
    return mail
