"""Options that every service has."""

from __future__ import annotations

from dataclasses import dataclass

from outrider.config.base import option
from outrider.config.secrets import read_secrets
from outrider.logs import LEVELS


@dataclass(frozen=True)
class ServiceOptions:
    """Options of a service. A service's own options inherit them and set the default addresses."""

    address: str = option("127.0.0.1:0", "Address of the gRPC door: host:port (port 0 takes a free one) or unix:/path.")
    metrics_address: str = option("", "Address of the Prometheus page, host:port; empty turns it off.")
    ready_file: str = option("", "File that is written, with the addresses really bound, when the service serves.")
    log_level: str = option("INFO", "Least important lines to log.", choices=LEVELS)
    drain_seconds: float = option(
        20.0, "Seconds that running requests get to finish after SIGTERM.", minimum=0, maximum=3600
    )
    tls_cert: str = option("", "PEM file with this service's certificate and those up to its root; empty: no TLS.")
    tls_key: str = option("", "PEM file with the private key of --tls-cert, not encrypted.")
    tls_ca: str = option(
        "", "PEM file with the certificates that clients' must be signed with (mTLS); empty asks them for none."
    )
    reflection: bool = option(False, "Let gRPC clients ask which methods and messages there are.")
    max_connection_age_seconds: float = option(
        0.0, "Seconds after which a gRPC connection takes no new calls; 0 for any age.", minimum=0, maximum=31536000
    )


@dataclass(frozen=True)
class PeerServiceOptions(ServiceOptions):
    """Options of a service that other services call."""

    auth_token: str = option("", "Bearer token that callers must send; empty lets everybody in.", secret=True)
    auth_token_file: str = option("", "File that holds the bearer token, instead of --auth-token.")

    def read_auth_tokens(self) -> tuple[str, ...]:
        """The tokens that open the door, none when everybody may come in. Raises ConfigError."""
        return read_secrets(self.auth_token, self.auth_token_file, "--auth-token")
