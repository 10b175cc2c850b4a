"""One replicator process: the cluster it writes to, its HTTP API, its share of the work."""

import ipaddress

from pydantic import ConfigDict, Field, SecretStr, model_validator

from kmirror_dagster.lifecycle import RetryPolicy
from kmirror_dagster.settings.base import Settings, dotted, refused
from kmirror_dagster.settings.clusters import ClusterSettings


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _node_alias(attribute: str) -> str:
    return dotted(attribute) if attribute.startswith("mirror_") else attribute


class NodeSettings(Settings):
    """Settings of a node. `mirror.*` are KIP-1279's broker settings."""

    model_config = ConfigDict(alias_generator=_node_alias)

    destination: ClusterSettings = Field(
        description="Cluster that is mirrored to; it also holds __mirror_state."
    )
    group_id: str = Field(
        default="kmirror",
        min_length=1,
        max_length=249,
        description="Consumer group that spreads the work over nodes.",
    )
    session_timeout_ms: int = Field(
        default=10_000,
        ge=1_000,
        le=300_000,
        description="A node silent for longer loses its work to the others, milliseconds.",
    )
    api_host: str = Field(default="127.0.0.1", min_length=1, description="Address the HTTP API listens on.")
    api_port: int = Field(default=0, ge=0, le=65_535, description="Port of the HTTP API; 0 takes a free one.")
    api_advertised_host: str | None = Field(
        default=None, min_length=1, description="Host by which others reach the API; api_host when not set."
    )
    api_tls_certificate: str | None = Field(
        default=None,
        min_length=1,
        description="PEM file of the API's certificate chain; plain HTTP when not set.",
    )
    api_tls_key: str | None = Field(
        default=None, min_length=1, description="PEM file of the API certificate's private key."
    )
    api_tls_key_password: SecretStr | None = Field(default=None, description="Password of that key.")
    api_tls_client_ca: str | None = Field(
        default=None,
        min_length=1,
        description="PEM file of authorities; clients of the API must show a certificate of theirs (mutual TLS).",
    )
    api_insecure: bool = Field(
        default=False,
        description="Listen beyond the loopback without TLS: the token can be read on the way.",
    )
    memory_budget_bytes: int = Field(
        default=256 * 1024 * 1024,
        ge=16 * 1024 * 1024,
        le=1 << 40,
        description="Record bytes held in memory at a time, over all mirrors of the node.",
    )
    mirror_topic_num_partitions: int = Field(
        default=50,
        ge=1,
        le=10_000,
        description="Coordinator partitions; fixed when __mirror_state is created.",
    )
    mirror_topic_replication_factor: int | None = Field(
        default=None,
        ge=1,
        le=32_767,
        description="Replicas of __mirror_state; 3, at most the brokers, when not set.",
    )
    mirror_metadata_refresh_interval_ms: int = Field(
        default=30_000,
        ge=100,
        le=86_400_000,
        description="Time between two refreshes of a mirror, milliseconds.",
    )
    mirror_failed_retry_initial_backoff_ms: int = Field(
        default=100,
        ge=1,
        le=86_400_000,
        description="Base of the wait before a FAILED partition is retried, milliseconds.",
    )
    mirror_failed_retry_max_backoff_ms: int = Field(
        default=300_000, ge=1, le=86_400_000, description="Cap of that wait, milliseconds."
    )
    mirror_failed_retry_max_attempts: int = Field(
        default=20,
        ge=0,
        le=1_000_000,
        description="Retries before a person has to recover it; 0: never retried.",
    )

    @model_validator(mode="after")
    def _check(self) -> "NodeSettings":
        if self.api_tls_certificate and not self.api_tls_key:
            raise refused("is required with api_tls_certificate", setting="api_tls_key")
        if self.api_tls_key and not self.api_tls_certificate:
            raise refused("is required with api_tls_key", setting="api_tls_certificate")
        if self.api_tls_key_password and not self.api_tls_key:
            raise refused("is required with api_tls_key_password", setting="api_tls_key")
        if self.api_tls_client_ca and not self.api_tls_certificate:
            raise refused("is required with api_tls_client_ca", setting="api_tls_certificate")
        if not (self.api_tls_certificate or self.api_insecure or _is_loopback(self.api_host)):
            raise refused(
                f"{self.api_host} is not the loopback and the API has no TLS, so its token could be read on the way: "
                "set api_tls_certificate and api_tls_key, or api_insecure: true in a network of its own",
                setting="api_host",
            )
        if self.mirror_failed_retry_max_backoff_ms < self.mirror_failed_retry_initial_backoff_ms:
            raise refused(
                "must be at least mirror.failed.retry.initial.backoff.ms",
                setting="mirror.failed.retry.max.backoff.ms",
            )
        return self

    def retry_policy(self) -> RetryPolicy:
        """Back-off of FAILED partitions."""
        return RetryPolicy(
            initial_ms=self.mirror_failed_retry_initial_backoff_ms,
            max_ms=self.mirror_failed_retry_max_backoff_ms,
            max_attempts=self.mirror_failed_retry_max_attempts,
        )
