"""Options of the gateway."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from outrider.config.base import option
from outrider.config.service import ServiceOptions
from outrider.errors import ConfigError


@dataclass(frozen=True)
class GatewayOptions(ServiceOptions):
    """The clients' door: gRPC and an OpenAI-compatible REST interface."""

    address: str = option(
        "127.0.0.1:50051", "Address of the gRPC door: host:port (port 0 takes a free one) or unix:/path."
    )
    rest_address: str = option(
        "127.0.0.1:8000", "Address of the REST door, host:port (port 0 takes a free one); it serves /metrics too."
    )
    metrics_address: str = option(
        "", "Address of a further Prometheus page, host:port, for scrapers without the API key; empty turns it off."
    )
    verify: tuple[str, ...] = option(
        ("127.0.0.1:50052",), "Addresses of the verify replicas, host:port or unix:/path, comma separated."
    )
    verify_auth_token: str = option("", "Bearer token for the verify replicas.", secret=True)
    tokenizer: Path | None = option(
        None, "Folder with tokenizer.json and tokenizer_config.json. Unset: the folder that verify names."
    )
    api_key: str = option("", "Bearer token that clients must send; empty lets everybody in.", secret=True)
    api_key_file: Path | None = option(None, "File that holds the bearer token, instead of --api-key.")

    max_answers: int = option(256, "Answers in the making at once, over both doors; more get 429.", minimum=1)
    max_prompts: int = option(128, "Prompts in one request.", minimum=1, maximum=4096)
    max_body_bytes: int = option(8388608, "Longest request body or message.", minimum=1024, maximum=1073741824)
    body_seconds: float = option(30.0, "Seconds that a client gets to send its body.", minimum=0.1, maximum=3600)
    stall_seconds: float = option(60.0, "Seconds that a client may leave its stream unread.", minimum=0.1, maximum=3600)
    affinity_tokens: int = option(
        64, "First tokens of a prompt that choose the replica, so that equal beginnings meet its cache.", minimum=1
    )
    probe_seconds: float = option(
        2.0, "Seconds between looks at a verify replica that serves.", minimum=0.05, maximum=600
    )

    def check(self) -> None:
        """Raise ConfigError where options do not fit each other."""
        if not self.verify:
            raise ConfigError("--verify: no address; name at least one verify replica, like 127.0.0.1:50052")
        if len(set(self.verify)) < len(self.verify):
            raise ConfigError("--verify: an address is named twice; name each replica once")
        if self.api_key and self.api_key_file is not None:
            raise ConfigError("--api-key-file: --api-key is set too; use one of them")

    def read_api_key(self) -> str:
        """Return the bearer token of clients, empty when everybody may come in. Raises ConfigError."""
        if self.api_key_file is None:
            return self.api_key
        try:
            key = self.api_key_file.read_text(encoding="utf-8").strip()
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"--api-key-file: {self.api_key_file} cannot be read: {error}") from None
        if not key:
            raise ConfigError(f"--api-key-file: {self.api_key_file} is empty; write the bearer token into it")
        return key
