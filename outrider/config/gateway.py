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
    """The service that clients call, with gRPC and an OpenAI-compatible REST API."""

    address: str = option("127.0.0.1:50051", GRPC_DOOR)
    rest_address: str = option(
        "127.0.0.1:8000", "Address of the REST door, host:port (port 0: any free port); it also serves /metrics."
    )
    metrics_address: str = option(
        "", "Address of a second Prometheus page, host:port, for scrapers without the API key; empty: no such page."
    )
    sglang_metrics: bool = option(
        False, "Also export metrics under SGLang's names (sglang:num_running_reqs and so on)."
    )
    verify: tuple[str, ...] = option(
        ("127.0.0.1:50052",),
        "Addresses of the verify replicas, host:port or unix:/path, comma separated. dns:///name:port stands for all "
        "addresses that the name currently has.",
    )
    dns_seconds: float = option(5.0, "Seconds between DNS lookups of the names in --verify.", minimum=0.1, maximum=3600)
    verify_auth_token: str = option("", "Bearer token for the verify replicas.", secret=True)
    verify_auth_token_file: str = option("", "File with this token, instead of --verify-auth-token.")
    verify_tls_ca: str = option(
        "", "PEM file with the CA certificates that must have signed the replicas' certificates; empty: no TLS to them."
    )
    verify_tls_cert: str = option("", "PEM file with the certificate to present to replicas that ask for one.")
    verify_tls_key: str = option("", "PEM file with the private key of this certificate.")
    verify_tls_name: str = option("", "Name in the replicas' certificates, if it is not their address.")
    tokenizer: Path | None = option(
        None, "Folder with tokenizer.json and tokenizer_config.json; empty: the folder that verify names."
    )
    generation_config: str = option(
        "auto",
        "Whether generation_config.json beside the tokenizer sets sampling defaults, and its max_new_tokens the most "
        "tokens of an answer; auto: if there is such a file.",
        choices=("auto", "none"),
    )
    reasoning_parser: str = option(
        "auto",
        "Markers that separate a model's reasoning from its answer: think for <think>, mistral for [THINK], kimi for "
        "◁think▷, seed for <seed:think>, gemma4 for <|channel>thought; auto: those that the chat template names.",
        choices=("auto", "none", "think", "mistral", "kimi", "seed", "gemma4"),
    )
    tool_call_parser: str = option(
        "auto",
        "Format in which the model writes tool calls; auto looks for a format's marks in the chat template, none "
        "leaves calls in the text.",
        choices=("auto", "hermes", "llama3", "mistral", "gemma4", "json", "none"),
    )
    api_key: str = option("", "Bearer token that clients must send; empty: no token is needed.", secret=True)
    api_key_file: Path | None = option(
        None,
        "File with bearer tokens, one per line, instead of --api-key; each is a client with a share of its own. A "
        "name after a token makes it part of the tenant of that name: cached text is shared only within a tenant.",
    )
    max_connection_age_seconds: float = option(
        3600.0, "Seconds after which a gRPC connection takes no new calls; 0: no limit.", minimum=0, maximum=31536000
    )
    max_request_seconds: float = option(
        3600.0, "Most seconds that a request may take, whatever deadline its client sets.", minimum=0.1, maximum=86400
    )

    max_answers: int = option(256, "Most answers generated at once, over both doors; further ones get 429.", minimum=1)
    max_prompts: int = option(128, "Most prompts in one request.", minimum=1, maximum=4096)
    max_body_bytes: int = option(8388608, "Most bytes of a request body or message.", minimum=1024, maximum=1073741824)
    body_seconds: float = option(
        30.0, "Seconds that a client has to send its body or message.", minimum=0.1, maximum=3600
    )
    stall_seconds: float = option(
        60.0, "Seconds that a client may leave its stream unread before it is ended.", minimum=0.1, maximum=3600
    )
    max_logprobs: int = option(
        4194304,
        "Most log-probabilities, traced nodes and their tokens in memory at once; a request may use a quarter of this.",
        minimum=1024,
    )
    max_connections: int = option(
        1024,
        "Most connections of a door at once; with more, idle ones are closed, or new ones if none is idle.",
        minimum=1,
    )
    max_connections_per_address: int = option(
        0, "Most connections of the REST door at once from one address, or one IPv6 /64; 0: half of all.", minimum=0
    )
    proxies: tuple[str, ...] = option(
        (),
        "Addresses or networks, like 10.1.2.0/24, of proxies in front of the REST door, comma separated: they may use "
        "all connections.",
    )
    header_seconds: float = option(
        10.0, "Seconds that a client has to send the head of a request.", minimum=0.05, maximum=3600
    )
    keep_alive_seconds: float = option(
        15.0, "Seconds without a token after which a comment is sent in a REST stream.", minimum=0.05, maximum=3600
    )
    cors_origins: tuple[str, ...] = option(
        (), "Origins, like https://example.org, whose pages may call the REST door, comma separated; *: all."
    )
    allowed_hosts: tuple[str, ...] = option(
        (),
        "Host names under which the REST door may be called, like example.org or *.example.org, comma separated, "
        "besides localhost and IP addresses; *: all. Empty: all, but only localhost on loopback without keys and TLS.",
    )
    ignore_unknown_fields: bool = option(
        False, "Ignore unknown fields of requests, as other servers do, instead of refusing the request."
    )
    no_page: bool = option(False, "Do not serve the page at / of the REST door, where people can try the model.")
    affinity_tokens: int = option(
        64,
        "Number of first tokens of a prompt that choose the replica, so that prompts with the same beginning find "
        "it in the cache.",
        minimum=1,
    )
    probe_seconds: float = option(
        2.0, "Seconds between health checks of a ready verify replica.", minimum=0.05, maximum=600
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
                    f"--allowed-hosts: {host!r} is not a host name; write it like example.org, without a port"
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
