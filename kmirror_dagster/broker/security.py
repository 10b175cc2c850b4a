"""TLS and SASL for the wire client, from the same settings that librdkafka gets."""

import functools
import logging
import re
import ssl
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import cast

import httpx
from kafka.net.sasl import get_sasl_mechanism
from kafka.net.sasl.abc import SaslMechanism
from kafka.net.sasl.oauth import AbstractTokenProvider
from pydantic import SecretStr

from kmirror_dagster.broker.client_errors import credentials_refused
from kmirror_dagster.errors import AuthenticationError, ClusterUnreachableError, SettingsError
from kmirror_dagster.settings import ClusterSettings

_log = logging.getLogger(__name__)

# Share of a token's life after which a new one is fetched; librdkafka refreshes at 80 % as well.
_REFRESH_AT = 0.8
# Life assumed when the identity provider does not tell (RFC 6749, 5.1: `expires_in` is only recommended).
_DEFAULT_LIFE_S = 300.0
_MAX_ANSWER_BYTES = 1_000_000
_TOKEN = re.compile(r"[\x21-\x7e]+")  # a control character would break out of the SASL message (RFC 7628)


def ssl_context(settings: ClusterSettings) -> ssl.SSLContext | None:
    """TLS for the wire client; None for protocols without TLS. Certificates are always verified.

    Raises:
        SettingsError: when a file is missing, unreadable or not what it should be.
    """
    if not settings.uses_tls:
        return None
    context = _verifying_context(settings.ssl_ca_location, "ssl.ca.location")
    # Kafka's meaning of "none": any host name will do, the chain has to be trusted all the same
    context.check_hostname = settings.ssl_endpoint_identification_algorithm == "https"
    if settings.ssl_certificate_location and settings.ssl_key_location:
        _load_identity(
            context, settings.ssl_certificate_location, settings.ssl_key_location, settings.ssl_key_password
        )
    return context


def check_files(settings: ClusterSettings) -> None:
    """Read the certificate files once: librdkafka's errors do not say which of them is wrong.

    Raises:
        SettingsError: naming setting, file and what is wrong with it.
    """
    ssl_context(settings)
    if settings.https_ca_location:
        _verifying_context(settings.https_ca_location, "https.ca.location")


def _verifying_context(ca_location: str | None, setting: str) -> ssl.SSLContext:
    # not create_default_context: since Python 3.13 it adds checks that librdkafka and Java do not make
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    if ca_location is None:
        context.load_default_certs()
        return context
    _check_readable(ca_location, setting)
    try:
        if Path(ca_location).is_dir():
            context.load_verify_locations(capath=ca_location)
        else:
            context.load_verify_locations(cafile=ca_location)
    except (ssl.SSLError, OSError) as error:
        raise SettingsError(
            f"{setting}: {ca_location} is not a PEM file of certificates: {_tls_reason(error)}"
        ) from error
    return context


def _load_identity(context: ssl.SSLContext, certificate: str, key: str, password: SecretStr | None) -> None:
    _check_readable(certificate, "ssl.certificate.location")
    _check_readable(key, "ssl.key.location")

    def ask() -> str:
        if password is None:  # OpenSSL would ask on the terminal, and wait there for ever
            raise SettingsError(f"ssl.key.password: is required, {key} is encrypted")
        return password.get_secret_value()

    try:
        context.load_cert_chain(certificate, key, password=ask)
    except (ssl.SSLError, OSError, ValueError) as error:
        raise SettingsError(
            f"ssl.certificate.location, ssl.key.location: {certificate} and {key} cannot be used together: "
            f"{_tls_reason(error)}; check both files and ssl.key.password"
        ) from None


def _check_readable(path: str, setting: str) -> None:
    try:
        if Path(path).is_dir():
            next(Path(path).iterdir(), None)
        else:
            with Path(path).open("rb"):
                pass
    except FileNotFoundError:
        raise SettingsError(f"{setting}: no such file: {path}") from None
    except OSError as error:
        raise SettingsError(f"{setting}: {path} cannot be read: {error.strerror or error}") from error


def _tls_reason(error: Exception) -> str:
    reason = getattr(error, "reason", None) or getattr(error, "strerror", None) or str(error)
    return str(reason).lower().replace("_", " ")


class SaslExchange:
    """One SASL exchange of one connection; failures of any kind come out as AuthenticationError."""

    def __init__(self, mechanism: SaslMechanism, settings: ClusterSettings) -> None:
        self._mechanism = mechanism
        self._settings = settings

    def auth_bytes(self) -> bytes:
        """Next message to the broker. May wait for a token of the identity provider: not for the event loop.

        Raises:
            AuthenticationError: when the identity provider refuses the client.
            ClusterUnreachableError: when it cannot be reached.
        """
        return cast("bytes", self._mechanism.auth_bytes())

    def receive(self, answer: bytes) -> None:
        """Take the broker's answer in.

        Raises:
            AuthenticationError: when it is a refusal, or does not prove that the broker knows the password.
        """
        try:
            self._mechanism.receive(answer)
        except (ValueError, KeyError, IndexError) as error:
            # SCRAM: a refusal has no fields to read, a broker without the password no valid signature
            raise credentials_refused(
                self._settings, "the answer is not what the mechanism demands"
            ) from error
        if self._mechanism.is_done() and not self._mechanism.is_authenticated():
            raise credentials_refused(self._settings)

    def is_done(self) -> bool:
        """Whether nothing more is to be sent."""
        return bool(self._mechanism.is_done())

    def is_authenticated(self) -> bool:
        """Whether the exchange ended well."""
        return bool(self._mechanism.is_done() and self._mechanism.is_authenticated())


def sasl_mechanism(settings: ClusterSettings) -> SaslExchange | None:
    """Start the SASL exchange of one new connection; None for protocols without SASL."""
    if not settings.uses_sasl or settings.sasl_mechanism is None:
        return None
    name = settings.sasl_mechanism
    kind = get_sasl_mechanism(name)
    if name == "OAUTHBEARER":
        return SaslExchange(kind(sasl_oauth_token_provider=token_provider(settings)), settings)
    username = settings.sasl_username or ""
    if name != "PLAIN":
        username = username.replace("=", "=3D").replace(",", "=2C")  # RFC 5802, 5.1: `saslname`
    password = settings.sasl_password.get_secret_value() if settings.sasl_password else ""
    return SaslExchange(
        kind(sasl_mechanism=name, sasl_plain_username=username, sasl_plain_password=password), settings
    )


def token_provider(settings: ClusterSettings) -> "TokenProvider":
    """Token source for OAUTHBEARER; connections with the same settings share one and its token."""
    return _shared_provider(
        settings.sasl_oauthbearer_token_endpoint_url or "",
        settings.sasl_oauthbearer_client_id or "",
        settings.sasl_oauthbearer_client_secret or SecretStr(""),
        settings.sasl_oauthbearer_scope,
        settings.https_ca_location,
        settings.socket_connection_setup_timeout_ms / 1_000,
    )


@functools.lru_cache(maxsize=64)
def _shared_provider(
    url: str, client_id: str, secret: SecretStr, scope: str | None, ca_location: str | None, timeout_s: float
) -> "TokenProvider":
    return TokenProvider(url, client_id, secret, scope=scope, ca_location=ca_location, timeout_s=timeout_s)


class TokenProvider(AbstractTokenProvider):
    """Tokens by OAuth client credentials (RFC 6749, 4.4), renewed before they expire. Thread-safe, blocking.

    Args:
        url: token endpoint.
        client_id: client id.
        secret: client secret.
        scope: scope to ask for, None for the provider's default.
        ca_location: PEM file or directory of authorities to trust, None for the system's.
        timeout_s: seconds each phase of a request may take.
        clock: monotonic seconds.
    """

    def __init__(
        self,
        url: str,
        client_id: str,
        secret: SecretStr,
        *,
        scope: str | None = None,
        ca_location: str | None = None,
        timeout_s: float = 10.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._url = url
        self._client_id = client_id
        self._secret = secret
        self._scope = scope
        self._ca_location = ca_location
        self._timeout_s = timeout_s
        self._clock = clock
        self._lock = threading.Lock()
        self._token = ""
        self._refresh_at = 0.0
        self._expires_at = 0.0

    def token(self) -> str:  # pyright: ignore[reportIncompatibleMethodOverride] - the base is untyped
        """A token that has not expired.

        Raises:
            AuthenticationError: when the endpoint refuses the client, or answers without a token.
            ClusterUnreachableError: when the endpoint cannot be reached or is out of order.
        """
        with self._lock:
            now = self._clock()
            if self._token and now < self._refresh_at:
                return self._token
            try:
                token, life_s = self._fetch()
            except ClusterUnreachableError as error:
                if self._token and now < self._expires_at:
                    _log.warning("%s; going on with the token that is still valid", error)
                    return self._token
                raise
            self._token = token
            self._refresh_at = now + life_s * _REFRESH_AT
            self._expires_at = now + life_s
            return token

    def _fetch(self) -> tuple[str, float]:
        form = {"grant_type": "client_credentials"}
        if self._scope:
            form["scope"] = self._scope
        try:
            answer = httpx.post(
                self._url,
                data=form,
                auth=(self._client_id, self._secret.get_secret_value()),
                headers={"Accept": "application/json"},
                timeout=self._timeout_s,
                follow_redirects=False,  # would carry the secret to an address nobody wrote down
                verify=_verifying_context(self._ca_location, "https.ca.location"),
            )
        except httpx.HTTPError as error:
            raise ClusterUnreachableError(
                f"cannot reach the token endpoint {self._url}: {str(error) or type(error).__name__}; "
                "check sasl.oauthbearer.token.endpoint.url and https.ca.location"
            ) from None
        return self._read(answer)

    def _read(self, answer: httpx.Response) -> tuple[str, float]:
        body: object = None
        if len(answer.content) <= _MAX_ANSWER_BYTES:
            try:
                body = answer.json()
            except ValueError:
                body = None
        fields = _Fields(body)
        if answer.status_code == 429 or answer.status_code >= 500:
            raise ClusterUnreachableError(
                f"the token endpoint {self._url} is out of order: HTTP status {answer.status_code}"
            )
        if answer.status_code != 200:
            code = fields.text("error")
            raise AuthenticationError(
                f"the token endpoint {self._url} refused client {self._client_id!r}: "
                f"HTTP status {answer.status_code}{f', {code[:60]}' if code else ''}; "
                "check sasl.oauthbearer.client.id, .client.secret and .scope"
            )
        token = fields.text("access_token")
        if not _TOKEN.fullmatch(token):
            raise AuthenticationError(
                f"the token endpoint {self._url} answered without an access_token; "
                "check sasl.oauthbearer.token.endpoint.url"
            )
        return token, fields.positive("expires_in") or _DEFAULT_LIFE_S


class _Fields:
    """Fields of a JSON answer that may be anything."""

    def __init__(self, body: object) -> None:
        self._body: dict[object, object] = body if isinstance(body, dict) else {}

    def text(self, name: str) -> str:
        value = self._body.get(name)
        return value if isinstance(value, str) else ""

    def positive(self, name: str) -> float:
        value = self._body.get(name)
        try:
            number = float(value) if isinstance(value, (int, float, str)) else 0.0
        except ValueError:
            number = 0.0
        return number if 0.0 < number < float("inf") else 0.0
