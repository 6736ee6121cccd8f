"""Options of the gateway."""

from __future__ import annotations

import re
from dataclasses import dataclass
from ipaddress import ip_network
from pathlib import Path
from typing import ClassVar

from outrider.config.base import option
from outrider.config.service import GRPC_DOOR, KEY_FIX, ServiceOptions, check_named_once, read_api_keys
from outrider.errors import ConfigError

_ORIGIN = re.compile(r"https?://[^/?#\s]+")
_HOST = re.compile(r"\*|(\*\.)?[A-Za-z0-9_-]+(\.[A-Za-z0-9_-]+)*")


@dataclass(frozen=True)
class GatewayOptions(ServiceOptions):
    """The clients' door: gRPC and an OpenAI-compatible REST interface."""

    address: str = option("127.0.0.1:50051", GRPC_DOOR)
    rest_address: str = option(
        "127.0.0.1:8000", "Address of the REST door, host:port (port 0 takes a free one); it serves /metrics too."
    )
    metrics_address: str = option(
        "", "Address of a further Prometheus page, host:port, for scrapers without the API key; empty turns it off."
    )
    sglang_metrics: bool = option(
        False, "Have the metrics page tell by SGLang's names (sglang:num_running_reqs and so on), too."
    )
    verify: tuple[str, ...] = option(
        ("127.0.0.1:50052",),
        "Addresses of the verify replicas, host:port or unix:/path, comma separated. dns:///name:port stands for all "
        "addresses that the name has, as they come and go.",
    )
    dns_seconds: float = option(5.0, "Seconds between two look-ups of names in --verify.", minimum=0.1, maximum=3600)
    verify_auth_token: str = option("", "Bearer token for the verify replicas.", secret=True)
    verify_auth_token_file: str = option("", "File that holds it, instead of --verify-auth-token.")
    verify_tls_ca: str = option(
        "", "PEM file with the certificates that replicas' must be signed with; empty talks to them without TLS."
    )
    verify_tls_cert: str = option("", "PEM file with the certificate shown to replicas that ask for one.")
    verify_tls_key: str = option("", "PEM file with its private key.")
    verify_tls_name: str = option("", "Name that replicas' certificates are made out to, if not their address.")
    tokenizer: Path | None = option(
        None, "Folder with tokenizer.json and tokenizer_config.json. Unset: the folder that verify names."
    )
    generation_config: str = option(
        "auto",
        "Whether generation_config.json beside the tokenizer gives defaults of sampling, and its max_new_tokens the "
        "most tokens of an answer: auto takes what is there.",
        choices=("auto", "none"),
    )
    reasoning_parser: str = option(
        "auto",
        "Markers by which what a model thinks is told apart from its answer: think for <think>, mistral for [THINK], "
        "kimi for ◁think▷, seed for <seed:think>, gemma4 for <|channel>thought; auto takes those that the chat "
        "template names.",
        choices=("auto", "none", "think", "mistral", "kimi", "seed", "gemma4"),
    )
    tool_call_parser: str = option(
        "auto",
        "How the model writes calls of tools; auto looks for a format's marks in the chat template, none leaves calls "
        "in the text.",
        choices=("auto", "hermes", "llama3", "mistral", "gemma4", "json", "none"),
    )
    api_key: str = option("", "Bearer token that clients must send; empty lets everybody in.", secret=True)
    api_key_file: Path | None = option(
        None,
        "File with bearer tokens, one a line, instead of --api-key; each is a client with a share of its own. A name "
        "behind a token puts it in the tenant of that name: cached text is shared within a tenant alone.",
    )
    max_connection_age_seconds: float = option(
        3600.0, "Seconds after which a gRPC connection takes no new calls; 0 for any age.", minimum=0, maximum=31536000
    )
    max_request_seconds: float = option(
        3600.0, "Longest that a request may take, whatever deadline its client sets.", minimum=0.1, maximum=86400
    )

    max_answers: int = option(256, "Answers in the making at once, over both doors; more get 429.", minimum=1)
    max_prompts: int = option(128, "Prompts in one request.", minimum=1, maximum=4096)
    max_body_bytes: int = option(8388608, "Longest request body or message.", minimum=1024, maximum=1073741824)
    body_seconds: float = option(
        30.0, "Seconds that a client gets to send its body or message.", minimum=0.1, maximum=3600
    )
    stall_seconds: float = option(60.0, "Seconds that a client may leave its stream unread.", minimum=0.1, maximum=3600)
    max_logprobs: int = option(
        4194304,
        "Log-probabilities, traced nodes and their tokens in memory at once; a quarter of it for one request.",
        minimum=1024,
    )
    max_connections: int = option(
        1024, "Connections of a door at once; over it idle ones are closed, and if there are none, new ones.", minimum=1
    )
    max_connections_per_address: int = option(
        0, "Connections of the REST door at once from one address, or one IPv6 /64; 0 for half of all.", minimum=0
    )
    proxies: tuple[str, ...] = option(
        (),
        "Addresses or networks, like 10.1.2.0/24, of proxies before the REST door, comma separated: they may have all "
        "connections.",
    )
    header_seconds: float = option(
        10.0, "Seconds that a client gets to send the head of a request.", minimum=0.05, maximum=3600
    )
    keep_alive_seconds: float = option(
        15.0, "Seconds without a token after which a REST stream gets a comment.", minimum=0.05, maximum=3600
    )
    cors_origins: tuple[str, ...] = option(
        (), "Origins, like https://example.org, whose pages may call the REST door, comma separated; * for all."
    )
    allowed_hosts: tuple[str, ...] = option(
        (),
        "Names by which the REST door may be called, like example.org or *.example.org, comma separated, beside "
        "localhost and plain addresses; * for all. Unset: all, but localhost alone on loopback without keys and TLS.",
    )
    ignore_unknown_fields: bool = option(
        False, "Leave out fields of requests that are not known, as other servers do, instead of refusing them."
    )
    no_page: bool = option(False, "Leave out the page at / of the REST door, where people can try the model.")
    affinity_tokens: int = option(
        64, "First tokens of a prompt that choose the replica, so that equal beginnings meet its cache.", minimum=1
    )
    probe_seconds: float = option(
        2.0, "Seconds between looks at a verify replica that serves.", minimum=0.05, maximum=600
    )

    key_fix: ClassVar[str] = KEY_FIX

    def check(self) -> None:
        """Raise ConfigError if options contradict each other, or one has a value that cannot be used."""
        if not self.verify:
            raise ConfigError("--verify: no address; name at least one verify replica, like 127.0.0.1:50052")
        check_named_once(self.verify, "--verify")
        for origin in self.cors_origins:
            if origin != "*" and not _ORIGIN.fullmatch(origin):
                raise ConfigError(f"--cors-origins: {origin!r} is no origin; write it like https://example.org:8443")
        for host in self.allowed_hosts:
            if not _HOST.fullmatch(host):
                raise ConfigError(
                    f"--allowed-hosts: {host!r} is no name of a host; write it like example.org, without a port"
                )
        for proxy in self.proxies:
            try:
                ip_network(proxy)
            except ValueError as error:
                raise ConfigError(f"--proxies: {error}; write it like 10.1.2.3 or 10.1.2.0/24") from None
        if self.tokenizer is not None and not (self.tokenizer / "tokenizer.json").is_file():
            raise ConfigError(
                f"--tokenizer: {self.tokenizer} has no tokenizer.json; name the folder of the served model"
            )
        if self.api_key and self.api_key_file is not None:
            raise ConfigError("--api-key-file: --api-key is set too; use one of them")

    def read_api_keys(self) -> dict[str, str]:
        """Return the clients' bearer tokens and their tenants; none if the doors are open. Raises ConfigError."""
        return read_api_keys(self.api_key, self.api_key_file)

    def read_api_key(self) -> str:
        """Return one bearer token that opens the doors; empty if they are open anyway. Raises ConfigError."""
        return next(iter(self.read_api_keys()), "")
