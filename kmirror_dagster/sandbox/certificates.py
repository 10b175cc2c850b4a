"""A throw-away certificate authority for sandbox clusters with TLS."""

import datetime
import ipaddress
from dataclasses import dataclass
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from kmirror_dagster.sandbox.properties import HOST

_VALID = datetime.timedelta(days=3650)
# Clocks of containers on one machine may differ by a little.
_SKEW = datetime.timedelta(hours=1)


@dataclass(frozen=True)
class KeyPair:
    """A private key with its certificate.

    Attributes:
        certificate: PEM file.
        key: PEM file, PKCS 8, not encrypted.
    """

    certificate: Path
    key: Path

    @classmethod
    def at(cls, folder: Path, name: str) -> "KeyPair":
        """The files of that name; they need not exist."""
        return cls(folder / f"{name}.pem", folder / f"{name}.key")


class CertificateFolder:
    """Certificates of one cluster; each is made at its first use and kept.

    Attributes:
        authority: PEM file of the authority, for clients to trust.
    """

    def __init__(self, folder: Path) -> None:
        """Describe the folder; nothing is written yet."""
        self._folder = folder
        self.authority = folder / "ca.pem"

    def server(self) -> KeyPair:
        """Certificate of the brokers, for 127.0.0.1 and localhost."""
        return self._issued("server", HOST, server=True)

    def client(self, name: str) -> KeyPair:
        """Certificate of a client; its principal is ``User:CN=name``."""
        return self._issued(f"client-{name}", name, server=False)

    def _issued(self, file_name: str, common_name: str, *, server: bool) -> KeyPair:
        pair = KeyPair.at(self._folder, file_name)
        if not pair.certificate.exists():
            authority_key, authority = self._load_authority()
            key = ec.generate_private_key(ec.SECP256R1())
            usage = ExtendedKeyUsageOID.SERVER_AUTH if server else ExtendedKeyUsageOID.CLIENT_AUTH
            builder = _builder(common_name, authority.subject, key.public_key())
            builder = builder.add_extension(x509.ExtendedKeyUsage([usage]), critical=False)
            builder = builder.add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
            identifier = x509.AuthorityKeyIdentifier.from_issuer_public_key(authority_key.public_key())
            builder = builder.add_extension(identifier, critical=False)
            if server:
                names = [x509.IPAddress(ipaddress.ip_address(HOST)), x509.DNSName("localhost")]
                builder = builder.add_extension(x509.SubjectAlternativeName(names), critical=False)
            _write(pair, key, builder.sign(authority_key, hashes.SHA256()))
        return pair

    def _load_authority(self) -> tuple[ec.EllipticCurvePrivateKey, x509.Certificate]:
        pair = KeyPair.at(self._folder, "ca")
        if pair.certificate.exists():
            key = serialization.load_pem_private_key(pair.key.read_bytes(), password=None)
            assert isinstance(key, ec.EllipticCurvePrivateKey)  # noqa: S101 - written below
            return key, x509.load_pem_x509_certificate(pair.certificate.read_bytes())
        key = ec.generate_private_key(ec.SECP256R1())
        name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "kmirror sandbox authority")])
        builder = _builder("kmirror sandbox authority", name, key.public_key())
        builder = builder.add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        usage = x509.KeyUsage(
            digital_signature=True,
            key_cert_sign=True,
            crl_sign=True,
            content_commitment=False,
            key_encipherment=False,
            data_encipherment=False,
            key_agreement=False,
            encipher_only=False,
            decipher_only=False,
        )
        certificate = builder.add_extension(usage, critical=True).sign(key, hashes.SHA256())
        _write(pair, key, certificate)
        return key, certificate


def _builder(common_name: str, issuer: x509.Name, key: ec.EllipticCurvePublicKey) -> x509.CertificateBuilder:
    now = datetime.datetime.now(datetime.timezone.utc)
    return (
        x509.CertificateBuilder()
        .subject_name(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, common_name)]))
        .issuer_name(issuer)
        .public_key(key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - _SKEW)
        .not_valid_after(now + _VALID)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key), critical=False)
    )


def _write(pair: KeyPair, key: ec.EllipticCurvePrivateKey, certificate: x509.Certificate) -> None:
    pair.key.parent.mkdir(parents=True, exist_ok=True)
    pair.key.touch(mode=0o600)
    pair.key.write_bytes(
        key.private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        )
    )
    pair.certificate.write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
