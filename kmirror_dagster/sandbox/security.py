"""Sandbox clusters that ask who is there: TLS, SASL PLAIN and SCRAM, client certificates, the authorizer."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from confluent_kafka import KafkaException
from confluent_kafka.admin import (  # the package does not list these three as its own
    AdminClient,
    ScramCredentialInfo,  # pyright: ignore[reportPrivateImportUsage]
    ScramMechanism,  # pyright: ignore[reportPrivateImportUsage]
    UserScramCredentialUpsertion,  # pyright: ignore[reportPrivateImportUsage]
)

from kmirror_dagster.errors import SandboxError
from kmirror_dagster.sandbox.certificates import CertificateFolder
from kmirror_dagster.sandbox.properties import CLIENT, INTERNAL, ListenerPlan, Protocol

Mechanism = Literal["PLAIN", "SCRAM-SHA-256", "SCRAM-SHA-512"]

_PLAIN_MODULE = "org.apache.kafka.common.security.plain.PlainLoginModule"
_SCRAM_MODULE = "org.apache.kafka.common.security.scram.ScramLoginModule"
_AUTHORIZER = "org.apache.kafka.metadata.authorizer.StandardAuthorizer"
_SCRAM_ITERATIONS = 4096
_REQUEST_S = 30.0
_SCRAM: dict[str, ScramMechanism] = {
    "SCRAM-SHA-256": ScramMechanism.SCRAM_SHA_256,
    "SCRAM-SHA-512": ScramMechanism.SCRAM_SHA_512,
}


@dataclass(frozen=True)
class User:
    """Somebody who may log in.

    Attributes:
        is_super: may do everything where there is an authorizer.
    """

    name: str
    password: str = field(repr=False)
    is_super: bool = False


@dataclass(frozen=True)
class ClusterSecurity:
    """How clients get into a cluster.

    Brokers talk to each other, and the sandbox asks whether they serve, on a listener of their own without
    security. With an authorizer whoever is on that listener is a super user; so it is for sandboxes only.

    Attributes:
        protocol: of the listener for clients.
        mechanism: how users log in, where the protocol is a SASL one.
        users: who may log in; the first is whom `SandboxCluster.settings` speaks for.
        authorizer: whether rights are checked (StandardAuthorizer); nobody has any at first but super users.
        client_certificates: whether clients need a certificate of the cluster's authority (mutual TLS).
    """

    protocol: Protocol = Protocol.SASL_SSL
    mechanism: Mechanism = "SCRAM-SHA-512"
    users: tuple[User, ...] = (User("mirror", "mirror-secret", is_super=True),)
    authorizer: bool = False
    client_certificates: bool = False

    def user(self, name: str | None) -> User:
        """One of the users; the first when none is named.

        Raises:
            SandboxError: there is none of that name.
        """
        for user in self.users:
            if name in (None, user.name):
                return user
        raise SandboxError(f"the sandbox cluster has no user {name!r}")

    def listeners(self, certificates: CertificateFolder) -> tuple[ListenerPlan, ListenerPlan]:
        """Listeners of every broker: one for brokers, one for clients."""
        properties: dict[str, str] = {}
        if self.protocol.is_tls:
            properties |= self._tls_properties(certificates)
        if self.protocol.is_sasl:
            name = self.mechanism.lower()
            properties["sasl.enabled.mechanisms"] = self.mechanism
            properties[f"{name}.sasl.jaas.config"] = self._jaas()
        return ListenerPlan(INTERNAL), ListenerPlan(CLIENT, self.protocol, properties)

    def _tls_properties(self, certificates: CertificateFolder) -> dict[str, str]:
        pair = certificates.server()
        return {
            "ssl.keystore.type": "PEM",
            "ssl.keystore.certificate.chain": pair.certificate.read_text(encoding="ascii"),
            "ssl.keystore.key": pair.key.read_text(encoding="ascii"),
            "ssl.truststore.type": "PEM",
            "ssl.truststore.certificates": certificates.authority.read_text(encoding="ascii"),
            "ssl.client.auth": "required" if self.client_certificates else "none",
        }

    def _jaas(self) -> str:
        if self.mechanism != "PLAIN":
            return f"{_SCRAM_MODULE} required;"  # credentials are in the cluster's metadata
        users = " ".join(f"user_{user.name}={_quoted(user.password)}" for user in self.users)
        return f"{_PLAIN_MODULE} required {users};"

    def broker_properties(self) -> dict[str, str]:
        """Settings of the brokers besides the listeners'."""
        if not self.authorizer:
            return {}
        principals = [_principal(user, self) for user in self.users if user.is_super]
        return {
            "authorizer.class.name": _AUTHORIZER,
            # ANONYMOUS: the brokers themselves, on their own listener.
            "super.users": ";".join(["User:ANONYMOUS", *principals]),
        }

    def client_properties(self, user: User, certificates: CertificateFolder) -> Mapping[str, str]:
        """Kafka client properties that let a user in."""
        properties = {"security.protocol": self.protocol.value}
        if self.protocol.is_tls:
            certificates.server()  # makes the authority
            properties["ssl.ca.location"] = str(certificates.authority)
        if self.protocol.is_tls and self.client_certificates:
            pair = certificates.client(user.name)
            properties["ssl.certificate.location"] = str(pair.certificate)
            properties["ssl.key.location"] = str(pair.key)
        if self.protocol.is_sasl:
            properties["sasl.mechanism"] = self.mechanism
            properties["sasl.username"] = user.name
            properties["sasl.password"] = user.password
        return properties

    def create_users(self, bootstrap: str) -> None:
        """Put SCRAM credentials into the cluster; nothing for other mechanisms.

        Args:
            bootstrap: ``bootstrap.servers`` of the brokers' own listener.

        Raises:
            SandboxError: the cluster refused.
        """
        mechanism = _SCRAM.get(self.mechanism)
        if mechanism is None or not self.protocol.is_sasl:
            return
        info = ScramCredentialInfo(mechanism, _SCRAM_ITERATIONS)
        client = AdminClient({"bootstrap.servers": bootstrap})
        try:
            for user in self.users:
                change = UserScramCredentialUpsertion(user.name, info, password=user.password.encode())
                answers = client.alter_user_scram_credentials([change], request_timeout=_REQUEST_S)
                answers[user.name].result(_REQUEST_S)
        except KafkaException as error:
            raise SandboxError(f"cannot create users: {error.args[0].str()}") from error


def certificate_folder(home: Path) -> CertificateFolder:
    """Certificates of the cluster in a directory."""
    return CertificateFolder(home / "tls")


def _quoted(text: str) -> str:
    """A string of a JAAS configuration."""
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'


def _principal(user: User, security: ClusterSecurity) -> str:
    return f"User:{user.name}" if security.protocol.is_sasl else f"User:CN={user.name}"
