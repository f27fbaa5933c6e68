"""Settings of events and notices; part of the server's settings."""

from __future__ import annotations

import ipaddress
from pathlib import Path
from typing import Literal, Self

from pydantic import Field, SecretStr, model_validator
from pydantic_settings import BaseSettings

from gpool.server.outbound import MailServer, Network


class NoticeSettings(BaseSettings):
    keep_events_days: float = Field(
        default=7, ge=4, description="Days that events and the log of their deliveries are kept."
    )
    webhook_networks: str = Field(
        default="",
        description="Networks besides the public Internet that webhooks may reach, e.g. 10.1.0.0/16, by commas.",
    )
    webhook_timeout_s: float = Field(
        default=10, ge=0.1, le=14, description="Time for a receiver of a webhook to answer."
    )
    low_balance_microcredits: int = Field(
        default=1_000_000, ge=0, description="Balance below which an account gets `balance.low`."
    )
    smtp_host: str | None = Field(
        default=None, description="Mail server; unset: the pool sends no mail."
    )
    smtp_port: int = Field(default=587, ge=1, le=65535, description="Port of the mail server.")
    smtp_security: Literal["tls", "starttls", "none"] = Field(
        default="starttls", description="TLS from the first byte, STARTTLS, or none."
    )
    smtp_user: str = Field(default="", description="User at the mail server; empty: no sign-in.")
    smtp_password: SecretStr | None = Field(default=None, description="Password of `smtp_user`.")
    smtp_password_file: Path | None = Field(
        default=None, description="File with the password, instead of `smtp_password`."
    )
    mail_from: str = Field(
        default="", description="Sender of mails, e.g. `Pool <pool@example.org>`."
    )
    mail_every_s: float = Field(
        default=60, ge=0, description="Least time between two mails to one address."
    )

    @model_validator(mode="after")
    def _check_notices(self) -> Self:
        self.webhook_allowed  # noqa: B018 - raises for text that is no network
        if self.smtp_host and not self.mail_from:
            raise ValueError("smtp_host needs mail_from: the address that mails come from")
        if self.smtp_password is not None and self.smtp_password_file is not None:
            raise ValueError("set one of smtp_password and smtp_password_file")
        return self

    @property
    def webhook_allowed(self) -> tuple[Network, ...]:
        words = (word.strip() for word in self.webhook_networks.split(","))
        return tuple(ipaddress.ip_network(word) for word in words if word)

    @property
    def mail_server(self) -> MailServer | None:
        """None: no mail is sent. Reads the password's file at each call, so that it can be changed."""
        if self.smtp_host is None:
            return None
        password = "" if self.smtp_password is None else self.smtp_password.get_secret_value()
        if self.smtp_password_file is not None:
            password = self.smtp_password_file.read_text().strip()
        return MailServer(
            self.smtp_host,
            self.smtp_port,
            self.smtp_security,
            self.mail_from,
            self.smtp_user,
            password,
        )
