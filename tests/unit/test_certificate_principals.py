"""A client certificate's principal is told as brokers write it."""

from datetime import datetime, timedelta, timezone
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from kmirror_dagster.broker.missing_rights import principal_of
from kmirror_dagster.settings import ClusterSettings

# right-hand sides: RFC 2253 as Java's X500Principal.getName() reads it
NAMES = {
    "plain": ([(NameOID.ORGANIZATION_NAME, "Org"), (NameOID.COMMON_NAME, "mirror")], "CN=mirror,O=Org"),
    "escaped": (
        [
            (NameOID.ORGANIZATION_NAME, "Clients, Ltd."),
            (NameOID.ORGANIZATIONAL_UNIT_NAME, "Testing cert #1 a=b #c"),
            (NameOID.COMMON_NAME, "client.example.org"),
        ],
        r"CN=client.example.org,OU=Testing cert \#1 a\=b \#c,O=Clients\, Ltd.",
    ),
    "without a keyword": (
        [(NameOID.SERIAL_NUMBER, "5"), (NameOID.COMMON_NAME, "x"), (NameOID.EMAIL_ADDRESS, "a@b.c")],
        "1.2.840.113549.1.9.1=#16056140622e63,CN=x,2.5.4.5=#130135",
    ),
    "spaces at its ends": ([(NameOID.COMMON_NAME, " a b ")], "CN=\\ a b\\ "),
}


@pytest.mark.parametrize("name", NAMES)
def test_the_subject_is_written_as_a_broker_does(tmp_path: Path, name: str) -> None:
    """So that the `kafka-acls` line of a missing right grants it to whom the broker sees."""
    parts, written = NAMES[name]
    subject = x509.Name([x509.NameAttribute(oid, value) for oid, value in parts])
    key = ec.generate_private_key(ec.SECP256R1())
    now = datetime.now(timezone.utc)
    builder = x509.CertificateBuilder(subject, subject, key.public_key(), 1, now, now + timedelta(days=1))
    file = tmp_path / "client.pem"
    file.write_bytes(builder.sign(key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM))
    settings = ClusterSettings.model_validate(
        {
            "bootstrap.servers": "broker:9093",
            "security.protocol": "SSL",
            "ssl.certificate.location": str(file),
            "ssl.key.location": str(file),
        }
    )
    assert principal_of(settings) == f"User:{written}"
