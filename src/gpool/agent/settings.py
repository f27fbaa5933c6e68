"""What an agent has to be told. Checks form only; nothing is opened here."""

from __future__ import annotations

import os
from pathlib import Path

from pydantic import Field
from pydantic_settings import BaseSettings, SettingsConfigDict

from gpool.core.errors import Invalid
from gpool.core.model import GIB


class AgentSettings(BaseSettings):
    """From keywords, else from `GPOOL_AGENT_*` variables."""

    model_config = SettingsConfigDict(env_prefix="GPOOL_AGENT_", extra="forbid")

    server_url: str
    fingerprint: str | None = None
    secret_file: Path
    data_dir: Path
    slots: int = Field(default_factory=lambda: os.cpu_count() or 1, ge=0, le=1024)
    simulate_gpus: str | None = None
    allow_process: bool = False  # the owner's own tasks may run without isolation
    cache_bytes: int = Field(default=10 * GIB, ge=0)

    def read_secret(self) -> str:
        """The node's secret; `Invalid` says how to get one."""
        try:
            secret = self.secret_file.read_text().strip()
        except OSError as error:
            raise Invalid(
                f"cannot read the node's secret from {self.secret_file}: {error.strerror}; join first: gpool join LINK"
            ) from error
        if not secret:
            raise Invalid(f"{self.secret_file} is empty; join again: gpool join LINK")
        return secret
