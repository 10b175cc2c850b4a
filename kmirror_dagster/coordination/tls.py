"""TLS towards the API."""

import ssl
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from pydantic import SecretStr

from kmirror_dagster.errors import SettingsError
from kmirror_dagster.settings import NodeSettings

CA_VARIABLE = "KMIRROR_CA"
CERTIFICATE_VARIABLE = "KMIRROR_CERTIFICATE"
KEY_VARIABLE = "KMIRROR_KEY"


@dataclass(frozen=True)
class ClientIdentity:
    """What a client shows to nodes that ask for a certificate (`api_tls_client_ca`).

    Attributes:
        certificate: PEM file of the certificate chain.
        key: PEM file of its key; None: it is in the same file.
        password: of the key.
    """

    certificate: Path
    key: Path | None = None
    password: SecretStr | None = None


def identity_of(environ: Mapping[str, str]) -> ClientIdentity | None:
    """The certificate that `KMIRROR_CERTIFICATE` and `KMIRROR_KEY` name; None when they name none."""
    certificate, key = environ.get(CERTIFICATE_VARIABLE), environ.get(KEY_VARIABLE)
    return ClientIdentity(Path(certificate), Path(key) if key else None) if certificate else None


def identity_of_node(settings: NodeSettings) -> ClientIdentity | None:
    """What a node shows to the others: the certificate of its own API."""
    if settings.api_tls_certificate is None or settings.api_tls_key is None:
        return None
    certificate, key = Path(settings.api_tls_certificate), Path(settings.api_tls_key)
    return ClientIdentity(certificate, key, settings.api_tls_key_password)


def verifying_context(ca: Path | None, identity: ClientIdentity | None = None) -> ssl.SSLContext:
    """Context that verifies certificate and host name.

    Args:
        ca: PEM file of authorities to trust, or of the very certificate a node shows; None for the system's
            authorities.
        identity: shown to nodes that ask for a certificate.

    Raises:
        SettingsError: a file cannot be used.
    """
    try:
        context = ssl.create_default_context(cafile=ca)
    except (OSError, ssl.SSLError) as error:
        raise SettingsError(f"{CA_VARIABLE}: {ca}: {error.strerror or error}") from None
    # a node announces its own certificate to clients on its machine: that one is trusted without its issuer
    context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
    if identity is not None:
        _show(context, identity)
    return context


def _show(context: ssl.SSLContext, identity: ClientIdentity) -> None:
    # without a password OpenSSL would ask on the terminal
    password = identity.password.get_secret_value() if identity.password else ""
    try:
        context.load_cert_chain(identity.certificate, identity.key, password=password)
    except (OSError, ssl.SSLError) as error:
        raise SettingsError(
            f"{CERTIFICATE_VARIABLE}, {KEY_VARIABLE}: {identity.certificate} cannot be shown to nodes: "
            f"{error.strerror or error}"
        ) from None
