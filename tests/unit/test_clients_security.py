"""TLS, SASL and tokens of the wire client."""

import socket
import ssl
import threading
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import trustme
from pydantic import SecretStr

from kmirror_dagster.broker.clients import librdkafka_config, sasl_mechanism, ssl_context
from kmirror_dagster.broker.security import TokenProvider, token_provider
from kmirror_dagster.errors import AuthenticationError, ClusterUnreachableError, SettingsError
from kmirror_dagster.settings import ClusterSettings
from tests.helpers.identity import identity_provider

SECRET = "hunter2-not-to-be-seen"


@dataclass(frozen=True)
class Files:
    """Certificates of one authority, as PEM files."""

    authority: trustme.CA
    home: Path

    @property
    def ca(self) -> str:
        """The authority's certificate."""
        return str(self.home / "ca.pem")

    def identity(self, name: str) -> tuple[str, str]:
        """Certificate and key of a name."""
        cert = self.authority.issue_cert(name)
        certificate, key = self.home / f"{name}.pem", self.home / f"{name}.key"
        certificate.write_bytes(b"".join(pem.bytes() for pem in cert.cert_chain_pems))
        key.write_bytes(cert.private_key_pem.bytes())
        return str(certificate), str(key)

    def server_context(self, *names: str, mutual: bool = False) -> ssl.SSLContext:
        """Context of a server with those names in its certificate."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self.authority.issue_cert(*names).configure_cert(context)
        if mutual:
            context.verify_mode = ssl.CERT_REQUIRED
            self.authority.configure_trust(context)
        return context


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Files:
    """An authority of the tests."""
    made = Files(trustme.CA(), tmp_path_factory.mktemp("tls"))
    made.authority.cert_pem.write_to_path(made.ca)
    return made


def tls(**more: Any) -> ClusterSettings:
    """TLS settings with underscored names."""
    return ClusterSettings(bootstrap_servers=("localhost:9092",), security_protocol="SSL", **more)


@contextmanager
def tls_server(context: ssl.SSLContext) -> Iterator[int]:
    """A server that shakes hands once, sends a byte and closes; its port."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            sock, _ = listener.accept()
            try:
                with context.wrap_socket(sock, server_side=True) as secure:
                    secure.sendall(b"x")
            except OSError:
                sock.close()  # the client did not like us, or we did not like it

        thread = threading.Thread(target=serve)
        thread.start()
        try:
            yield listener.getsockname()[1]
        finally:
            thread.join()


def shake_hands(client: ssl.SSLContext, server: ssl.SSLContext, name: str = "localhost") -> str:
    """Result of a handshake as the client sees it: "ok" or the reason why not."""
    with tls_server(server) as port, socket.create_connection(("127.0.0.1", port)) as sock:
        try:
            with client.wrap_socket(sock, server_hostname=name) as secure:
                return "ok" if secure.recv(1) == b"x" else "closed"
        except ssl.SSLCertVerificationError as error:
            return error.verify_message
        except ssl.SSLError as error:
            return str(error.reason)


def context_of(settings: ClusterSettings) -> ssl.SSLContext:
    """TLS context of settings that have one."""
    context = ssl_context(settings)
    assert context is not None
    return context


def test_without_tls_there_is_no_context() -> None:
    """PLAINTEXT and SASL_PLAINTEXT need none."""
    assert ssl_context(ClusterSettings(bootstrap_servers=("a:1",))) is None
    assert sasl_mechanism(ClusterSettings(bootstrap_servers=("a:1",))) is None


def test_a_broker_of_a_trusted_authority_is_accepted(files: Files) -> None:
    """Chain and host name are verified against ssl.ca.location."""
    assert shake_hands(context_of(tls(ssl_ca_location=files.ca)), files.server_context("localhost")) == "ok"


def test_a_broker_of_an_unknown_authority_is_refused(files: Files) -> None:
    """A certificate of another authority is never accepted, without host name verification neither."""
    other = Files(trustme.CA(), files.home)
    for algorithm in ("https", "none"):
        context = context_of(tls(ssl_ca_location=files.ca, ssl_endpoint_identification_algorithm=algorithm))
        assert context.verify_mode == ssl.CERT_REQUIRED
        assert (
            shake_hands(context, other.server_context("localhost"))
            == "unable to get local issuer certificate"
        )
    system = context_of(tls())
    assert shake_hands(system, files.server_context("localhost")) == "unable to get local issuer certificate"


def test_another_host_name_is_refused_unless_told_otherwise(files: Files) -> None:
    """The certificate has to name the host; `none` lifts that and nothing else."""
    server = files.server_context("elsewhere.example.org")
    strict = context_of(tls(ssl_ca_location=files.ca))
    assert "certificate is not valid for 'localhost'" in shake_hands(strict, server)
    lenient = context_of(tls(ssl_ca_location=files.ca, ssl_endpoint_identification_algorithm="none"))
    assert shake_hands(lenient, server) == "ok"


def test_a_client_certificate_is_shown_to_the_broker(files: Files) -> None:
    """Mutual TLS: a broker that asks for a certificate gets the configured one."""
    certificate, key = files.identity("client.example.org")
    server = files.server_context("localhost", mutual=True)
    with_identity = tls(ssl_ca_location=files.ca, ssl_certificate_location=certificate, ssl_key_location=key)
    assert shake_hands(context_of(with_identity), server) == "ok"
    without = context_of(tls(ssl_ca_location=files.ca))
    assert shake_hands(without, server) == "TLSV13_ALERT_CERTIFICATE_REQUIRED"


def encrypted(key: str, password: str, target: Path) -> str:
    """A private key encrypted with a password."""
    from cryptography.hazmat.primitives import serialization

    loaded = serialization.load_pem_private_key(Path(key).read_bytes(), None)
    target.write_bytes(
        loaded.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.BestAvailableEncryption(password.encode()),
        )
    )
    return str(target)


def test_an_encrypted_key_needs_its_password(files: Files, tmp_path: Path) -> None:
    """The right password opens it; a missing one is a message and not a question on the terminal."""
    certificate, key = files.identity("client.example.org")
    key = encrypted(key, SECRET, tmp_path / "encrypted.key")
    known = {"ssl_ca_location": files.ca, "ssl_certificate_location": certificate, "ssl_key_location": key}
    context_of(tls(**known, ssl_key_password=SECRET))
    with pytest.raises(SettingsError, match=r"^ssl\.key\.password: is required, .* is encrypted$"):
        ssl_context(tls(**known))
    with pytest.raises(SettingsError, match=r"cannot be used together: .*; check both files") as caught:
        ssl_context(tls(**known, ssl_key_password=SECRET + "x"))
    assert SECRET not in "".join(traceback.format_exception(caught.value))


def test_unusable_files_are_named_with_their_setting(files: Files, tmp_path: Path) -> None:
    """A file that is missing or no certificate is named, for both clients, before anything is connected."""
    certificate, key = files.identity("client.example.org")
    garbage = tmp_path / "garbage.pem"
    garbage.write_text("no certificate")
    missing = str(tmp_path / "missing.pem")
    for document, message in (
        ({"ssl_ca_location": missing}, f"ssl.ca.location: no such file: {missing}"),
        (
            {"ssl_ca_location": str(garbage)},
            f"ssl.ca.location: {garbage} is not a PEM file of certificates: ",
        ),
        (
            {"ssl_certificate_location": missing, "ssl_key_location": key},
            f"ssl.certificate.location: no such file: {missing}",
        ),
        (
            {"ssl_certificate_location": certificate, "ssl_key_location": missing},
            f"ssl.key.location: no such file: {missing}",
        ),
        (
            {"ssl_certificate_location": certificate, "ssl_key_location": files.identity("b")[1]},
            "ssl.certificate.location, ssl.key.location: ",
        ),
    ):
        for use in (ssl_context, librdkafka_config):
            with pytest.raises(SettingsError) as caught:
                use(tls(**document))
            assert str(caught.value).startswith(message)
            assert "\n" not in str(caught.value)


def test_a_directory_of_authorities_is_taken(files: Files, tmp_path: Path) -> None:
    """ssl.ca.location may be a directory, as for librdkafka."""
    assert ssl_context(tls(ssl_ca_location=str(tmp_path))) is not None


def sasl(mechanism: str, **more: Any) -> ClusterSettings:
    """SASL settings with underscored names."""
    known: dict[str, Any] = {"sasl_username": "a=b,c", "sasl_password": SECRET}
    return ClusterSettings(
        bootstrap_servers=("localhost:9092",),
        security_protocol="SASL_PLAINTEXT",
        sasl_mechanism=mechanism,  # type: ignore[arg-type]
        **(more or known),
    )


def test_plain_sends_name_and_password() -> None:
    """PLAIN is one message (RFC 4616), and an answer that is not empty is a refusal."""
    exchange = sasl_mechanism(sasl("PLAIN"))
    assert exchange is not None
    assert exchange.auth_bytes() == f"a=b,c\0a=b,c\0{SECRET}".encode()
    assert not exchange.is_authenticated()
    exchange.receive(b"")
    assert exchange.is_authenticated()
    refused = sasl_mechanism(sasl("PLAIN"))
    assert refused is not None
    with pytest.raises(
        AuthenticationError, match=r"for user 'a=b,c' at localhost:9092: check sasl\.username"
    ):
        refused.receive(b"no")


@pytest.mark.parametrize("answer", [b"e=other-error", b"r=x,s=QQ==,i=4096", b"", b"\xff", b"r=x,s=QQ==,i=x"])
@pytest.mark.parametrize("mechanism", ["SCRAM-SHA-256", "SCRAM-SHA-512"])
def test_scram_takes_proof_only(mechanism: str, answer: bytes) -> None:
    """The name is escaped (RFC 5802); what is no proof of the broker's knowledge is a refusal."""
    exchange = sasl_mechanism(sasl(mechanism))
    assert exchange is not None
    assert exchange.auth_bytes().startswith(b"n,,n=a=3Db=2Cc,r=")
    with pytest.raises(AuthenticationError) as caught:
        exchange.receive(answer)
    assert SECRET not in "".join(traceback.format_exception(caught.value))


def oauth(url: str, **more: Any) -> ClusterSettings:
    """OAUTHBEARER settings for a token endpoint."""
    return sasl(
        "OAUTHBEARER",
        sasl_oauthbearer_token_endpoint_url=url,
        sasl_oauthbearer_client_id="kmirror",
        sasl_oauthbearer_client_secret=SecretStr(SECRET),
        **more,
    )


def test_a_token_is_fetched_once_for_all_connections() -> None:
    """Connections share a token while it is fresh; scope and client are sent as the settings say."""
    with identity_provider(secret=SECRET) as provider:
        settings = oauth(provider.url, sasl_oauthbearer_scope="kafka")
        first, second = sasl_mechanism(settings), sasl_mechanism(settings)
        assert first is not None
        assert second is not None
        message = first.auth_bytes()
        assert message == second.auth_bytes()
        assert message.startswith(b"n,,\x01auth=Bearer ey")
        assert provider.requests == [{"grant_type": ["client_credentials"], "scope": ["kafka"]}]
        first.receive(b"")
        assert first.is_authenticated()
        assert token_provider(settings) is token_provider(settings)


class Clock:
    """Seconds that a test moves."""

    def __init__(self) -> None:
        self.now = 1_000.0

    def __call__(self) -> float:
        return self.now


def test_a_token_is_renewed_before_it_expires() -> None:
    """After 80 % of its life a new one is fetched; an endpoint out of order is bridged until it expires."""
    clock = Clock()
    with identity_provider(secret=SECRET, life_s=100) as provider:
        tokens = TokenProvider(provider.url, "kmirror", SecretStr(SECRET), clock=clock)
        first = tokens.token()
        clock.now += 79
        assert tokens.token() == first
        clock.now += 2
        second = tokens.token()
        assert second != first
        provider.answer = (503, b"")
        clock.now += 90
        assert tokens.token() == second
        clock.now += 11
        with pytest.raises(ClusterUnreachableError, match="is out of order: HTTP status 503"):
            tokens.token()
        provider.answer = None
        assert tokens.token() not in (first, second)


def test_threads_share_one_fetch() -> None:
    """Connections that open at the same time lead to one request."""
    with identity_provider(secret=SECRET) as provider:
        tokens = TokenProvider(provider.url, "kmirror", SecretStr(SECRET))
        threads = [threading.Thread(target=tokens.token) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(provider.requests) == 1


@pytest.mark.parametrize(
    ("answer", "kind", "message"),
    [
        (
            (401, b'{"error": "invalid_client"}'),
            AuthenticationError,
            "HTTP status 401, invalid_client; check",
        ),
        ((400, b"<html>"), AuthenticationError, "HTTP status 400; check"),
        ((302, b"http://127.0.0.1:1/"), AuthenticationError, "HTTP status 302; check"),
        ((200, b"<html>"), AuthenticationError, "answered without an access_token"),
        ((200, b"[]"), AuthenticationError, "answered without an access_token"),
        ((200, b'{"access_token": "a\\u0001b"}'), AuthenticationError, "answered without an access_token"),
        ((200, b'{"access_token": 5}'), AuthenticationError, "answered without an access_token"),
        ((500, b"{}"), ClusterUnreachableError, "out of order: HTTP status 500"),
        ((429, b"{}"), ClusterUnreachableError, "out of order: HTTP status 429"),
    ],
)
def test_answers_without_a_token_are_one_line(
    answer: tuple[int, bytes], kind: type[Exception], message: str
) -> None:
    """Whatever the endpoint answers, the error names it and the remedy, and never the secret."""
    with identity_provider(answer=answer) as provider:
        with pytest.raises(kind, match=message) as caught:
            TokenProvider(provider.url, "kmirror", SecretStr(SECRET)).token()
        assert provider.url in str(caught.value)
        assert len(provider.requests) == 1
    assert SECRET not in "".join(traceback.format_exception(caught.value))


@pytest.mark.parametrize("expires_in", [b"0", b"-1", b'"soon"', b"null", b"Infinity", b"1e999"])
def test_a_token_of_unknown_life_is_renewed_now_and_then(expires_in: bytes) -> None:
    """Without a usable `expires_in` a token counts as good for five minutes."""
    clock = Clock()
    with identity_provider(
        answer=(200, b'{"access_token": "t", "expires_in": ' + expires_in + b"}")
    ) as provider:
        tokens = TokenProvider(provider.url, "kmirror", SecretStr(SECRET), clock=clock)
        for advance, requests in ((0, 1), (239, 1), (2, 2)):
            clock.now += advance
            assert tokens.token() == "t"
            assert len(provider.requests) == requests


def test_the_token_endpoint_is_verified(files: Files) -> None:
    """An endpoint that shows a certificate nobody vouches for gets no secret."""
    with identity_provider(files.server_context("127.0.0.1"), secret=SECRET) as provider:
        with pytest.raises(
            ClusterUnreachableError, match=r"cannot reach the token endpoint .*https\.ca\.location"
        ):
            TokenProvider(provider.url, "kmirror", SecretStr(SECRET)).token()
        assert provider.requests == []
        assert TokenProvider(provider.url, "kmirror", SecretStr(SECRET), ca_location=files.ca).token()


def test_an_endpoint_that_is_down_is_unreachable() -> None:
    """Nobody listening is not a refusal: it may be tried again."""
    with pytest.raises(ClusterUnreachableError, match="cannot reach the token endpoint") as caught:
        TokenProvider("http://127.0.0.1:1/token", "kmirror", SecretStr(SECRET)).token()
    assert caught.value.retriable
