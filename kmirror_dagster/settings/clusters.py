"""How to reach one Kafka cluster: one object feeds both clients. Names are Kafka's client properties."""

import re
from typing import Literal, TypeAlias
from urllib.parse import urlsplit

from pydantic import ConfigDict, Field, SecretStr, field_validator, model_validator

from kmirror_dagster.settings.base import Settings, dotted, refused

SecurityProtocol: TypeAlias = Literal["PLAINTEXT", "SSL", "SASL_PLAINTEXT", "SASL_SSL"]
SaslMechanismName: TypeAlias = Literal["PLAIN", "SCRAM-SHA-256", "SCRAM-SHA-512", "OAUTHBEARER"]
LibrdkafkaValue: TypeAlias = str | int | bool | float

# host, IPv4 address or [IPv6 address]; a port is required, as in Kafka's own clients
_ADDRESS = re.compile(r"(?:\[([0-9A-Fa-f:.]+(?:%[\w.-]+)?)\]|([A-Za-z0-9](?:[\w.-]*\w)?)):([0-9]{1,5})")
_ADDRESS_FORM = "expected host:port (an IPv6 address in brackets: [::1]:9092)"
_MAX_INT = 2_147_483_647


def parse_address(text: str) -> tuple[str, int]:
    """Split `host:port` or `[IPv6]:port`.

    Raises:
        PydanticCustomError: (a ValueError) when the text is neither, or the port is not in 1..65535.
    """
    match = _ADDRESS.fullmatch(text.strip())
    if match is None or not 1 <= int(match[3]) <= 65_535:
        raise refused(_ADDRESS_FORM)
    return match[1] or match[2], int(match[3])


class ClusterSettings(Settings):
    """Connection to one cluster.

    TLS is always verified: the certificate chain, and the host name unless
    `ssl.endpoint.identification.algorithm` is `none`.
    """

    model_config = ConfigDict(alias_generator=dotted)

    bootstrap_servers: tuple[str, ...] = Field(
        description="Brokers to ask first, as host:port; a list, or one text separated by commas."
    )
    client_id: str = Field(
        default="kmirror", min_length=1, max_length=249, description="Name in broker logs and quotas."
    )
    security_protocol: SecurityProtocol = Field(
        default="PLAINTEXT", description="PLAINTEXT, SSL, SASL_PLAINTEXT or SASL_SSL."
    )

    ssl_ca_location: str | None = Field(
        default=None,
        min_length=1,
        description="PEM file or directory of the authorities to trust; the system's when not set.",
    )
    ssl_certificate_location: str | None = Field(
        default=None, min_length=1, description="PEM file of the client certificate chain (mutual TLS)."
    )
    ssl_key_location: str | None = Field(
        default=None,
        min_length=1,
        description="PEM file of that certificate's private key.",
    )
    ssl_key_password: SecretStr | None = Field(default=None, description="Password of the private key.")
    ssl_endpoint_identification_algorithm: Literal["https", "none"] = Field(
        default="https",
        description="https: the certificate must name the host; none: any name, the chain is still verified.",
    )

    sasl_mechanism: SaslMechanismName | None = Field(
        default=None, description="PLAIN, SCRAM-SHA-256, SCRAM-SHA-512 or OAUTHBEARER."
    )
    sasl_username: str | None = Field(default=None, description="User name for PLAIN and SCRAM.")
    sasl_password: SecretStr | None = Field(default=None, description="Password for PLAIN and SCRAM.")
    sasl_oauthbearer_method: Literal["oidc"] = Field(
        default="oidc", description="How OAUTHBEARER gets its token: OpenID Connect client credentials."
    )
    sasl_oauthbearer_token_endpoint_url: str | None = Field(
        default=None, description="Token endpoint of the identity provider (OAUTHBEARER)."
    )
    sasl_oauthbearer_client_id: str | None = Field(default=None, description="Client id (OAUTHBEARER).")
    sasl_oauthbearer_client_secret: SecretStr | None = Field(
        default=None, description="Client secret (OAUTHBEARER)."
    )
    sasl_oauthbearer_scope: str | None = Field(
        default=None, description="Scope to ask for (OAUTHBEARER); the provider's default when not set."
    )
    https_ca_location: str | None = Field(
        default=None,
        min_length=1,
        description="As ssl.ca.location, for the token endpoint.",
    )

    request_timeout_ms: int = Field(
        default=30_000, ge=1_000, le=300_000, description="Longest wait for one answer, milliseconds."
    )
    socket_connection_setup_timeout_ms: int = Field(
        default=10_000,
        ge=1_000,
        le=300_000,
        description="Longest wait for a connection including TLS and SASL, milliseconds.",
    )
    connections_max_idle_ms: int = Field(
        default=540_000,
        ge=1_000,
        le=_MAX_INT,
        description="Idle connections are closed after this, milliseconds.",
    )
    reconnect_backoff_ms: int = Field(
        default=100, ge=1, le=3_600_000, description="First wait before connecting again, milliseconds."
    )
    reconnect_backoff_max_ms: int = Field(
        default=10_000, ge=1, le=3_600_000, description="Cap of that wait, milliseconds."
    )

    @field_validator("bootstrap_servers", mode="before")
    @classmethod
    def _split_servers(cls, value: object) -> object:
        parts: list[object]
        if isinstance(value, str):
            parts = [part for part in value.split(",") if part.strip()]
        elif isinstance(value, (list, tuple)):
            parts = list(value)
        else:
            raise refused(_ADDRESS_FORM)
        if not parts:
            raise refused(f"is empty: {_ADDRESS_FORM}")
        return tuple(part.strip() if isinstance(part, str) else part for part in parts)

    @field_validator("bootstrap_servers")
    @classmethod
    def _check_servers(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        for server in value:
            parse_address(server)
        return value

    @field_validator("security_protocol", "sasl_mechanism", mode="before")
    @classmethod
    def _upper(cls, value: object) -> object:
        return value.upper() if isinstance(value, str) else value

    @field_validator("sasl_oauthbearer_token_endpoint_url")
    @classmethod
    def _check_url(cls, value: str | None) -> str | None:
        if value is None:
            return None
        try:
            parts = urlsplit(value)
            host = parts.hostname
        except ValueError:
            host = parts = None
        if parts is None or parts.scheme not in ("https", "http") or not host:
            raise refused("expected an https:// address")
        if parts.username is not None or parts.password is not None:
            raise refused("must not carry credentials: use sasl.oauthbearer.client.id and .client.secret")
        return value

    @model_validator(mode="after")
    def _check_security(self) -> "ClusterSettings":
        self._check_tls()
        self._check_sasl()
        if self.reconnect_backoff_max_ms < self.reconnect_backoff_ms:
            raise refused("must be at least reconnect.backoff.ms", setting="reconnect.backoff.max.ms")
        return self

    def _check_tls(self) -> None:
        if not self.uses_tls:
            for name in (
                "ssl_ca_location",
                "ssl_certificate_location",
                "ssl_key_location",
                "ssl_key_password",
            ):
                self._refuse_useless(name, "SSL or SASL_SSL")
            return
        if self.ssl_certificate_location and not self.ssl_key_location:
            raise refused("is required with ssl.certificate.location", setting="ssl.key.location")
        if self.ssl_key_location and not self.ssl_certificate_location:
            raise refused("is required with ssl.key.location", setting="ssl.certificate.location")
        if self.ssl_key_password and not self.ssl_key_location:
            raise refused("is required with ssl.key.password", setting="ssl.key.location")

    def _check_sasl(self) -> None:
        login = ("sasl_username", "sasl_password")
        oauth = tuple(name for name in type(self).model_fields if name.startswith("sasl_oauthbearer_"))
        if not self.uses_sasl:
            for name in ("sasl_mechanism", *login, *oauth, "https_ca_location"):
                self._refuse_useless(name, "SASL_SSL or SASL_PLAINTEXT")
            return
        if self.sasl_mechanism is None:
            raise refused(
                f"is required with security.protocol {self.security_protocol}: "
                "PLAIN, SCRAM-SHA-256, SCRAM-SHA-512 or OAUTHBEARER",
                setting="sasl.mechanism",
            )
        if self.sasl_mechanism == "OAUTHBEARER":
            required = (
                "sasl_oauthbearer_token_endpoint_url",
                "sasl_oauthbearer_client_id",
                "sasl_oauthbearer_client_secret",
            )
            useless = login
        else:
            required, useless = login, (*oauth, "https_ca_location")
        for name in required:
            value = getattr(self, name)
            if not (value.get_secret_value() if isinstance(value, SecretStr) else value):
                raise refused(f"is required with sasl.mechanism {self.sasl_mechanism}", setting=dotted(name))
        for name in useless:
            if name in self.model_fields_set and getattr(self, name) is not None:
                raise refused(f"has no use with sasl.mechanism {self.sasl_mechanism}", setting=dotted(name))

    def _refuse_useless(self, name: str, protocols: str) -> None:
        # Silently ignoring it would leave an operator believing in protection that is not there.
        if name in self.model_fields_set and getattr(self, name) is not None:
            raise refused(
                f"has no effect with security.protocol {self.security_protocol}: "
                f"set that to {protocols}, or remove this",
                setting=dotted(name),
            )

    @property
    def uses_tls(self) -> bool:
        """Whether connections are encrypted."""
        return self.security_protocol in ("SSL", "SASL_SSL")

    @property
    def uses_sasl(self) -> bool:
        """Whether connections authenticate with SASL."""
        return self.security_protocol in ("SASL_PLAINTEXT", "SASL_SSL")

    @property
    def address(self) -> str:
        """Bootstrap servers as one text, for messages."""
        return ",".join(self.bootstrap_servers)

    def bootstrap(self) -> list[tuple[str, int]]:
        """Bootstrap servers as (host, port); IPv6 addresses without brackets."""
        return [parse_address(server) for server in self.bootstrap_servers]

    def as_librdkafka(self) -> dict[str, LibrdkafkaValue]:
        """Properties for librdkafka, secrets revealed; only the broker room calls this.

        librdkafka's `request.timeout.ms` is a producer's; what Kafka means by it is its `socket.timeout.ms`.
        """
        config: dict[str, LibrdkafkaValue] = {
            "bootstrap.servers": self.address,
            "client.id": self.client_id,
            "security.protocol": self.security_protocol,
            "socket.timeout.ms": self.request_timeout_ms,
            "socket.connection.setup.timeout.ms": self.socket_connection_setup_timeout_ms,
            "connections.max.idle.ms": self.connections_max_idle_ms,
            "reconnect.backoff.ms": self.reconnect_backoff_ms,
            "reconnect.backoff.max.ms": self.reconnect_backoff_max_ms,
        }
        prefixes = (("ssl_",) if self.uses_tls else ()) + (("sasl_", "https_") if self.uses_sasl else ())
        for name in type(self).model_fields:
            value = getattr(self, name)
            if not name.startswith(prefixes or ("-",)) or value is None:
                continue
            if name == "sasl_oauthbearer_method" and self.sasl_mechanism != "OAUTHBEARER":
                continue
            config[dotted(name)] = value.get_secret_value() if isinstance(value, SecretStr) else value
        return config
