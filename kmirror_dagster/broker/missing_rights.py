"""Rights a principal lacks: the error that names them, and the `kafka-acls` line that grants them."""

import functools
import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from kmirror_dagster.broker import codes
from kmirror_dagster.errors import AuthorizationError, BrokerError
from kmirror_dagster.settings import ClusterSettings

if TYPE_CHECKING:
    from cryptography.x509 import Name, NameAttribute

_ESCAPED_SPACE = "\\ "

_DENIED = frozenset(
    {
        codes.TOPIC_AUTHORIZATION_FAILED,
        codes.GROUP_AUTHORIZATION_FAILED,
        codes.CLUSTER_AUTHORIZATION_FAILED,
        codes.TRANSACTIONAL_ID_AUTHORIZATION_FAILED,
    }
)


@dataclass(frozen=True)
class Right:
    """What a call needs: named in the error when it is missing.

    Attributes:
        operation: Kafka's name of the ACL operation ("DESCRIBE_CONFIGS").
        resource: kind of resource ("topic", "group", "cluster", "transactional-id").
    """

    operation: str
    resource: str


def principal_of(settings: ClusterSettings) -> str:
    """Principal a cluster most likely sees (mappings by broker rules are not visible from outside)."""
    if settings.uses_sasl and settings.sasl_username:
        return f"User:{settings.sasl_username}"
    if settings.uses_sasl and settings.sasl_oauthbearer_client_id:
        return f"User:{settings.sasl_oauthbearer_client_id}"
    if settings.uses_tls and settings.ssl_certificate_location:
        return _subject_of(settings.ssl_certificate_location)
    return "User:ANONYMOUS"


@functools.lru_cache(maxsize=64)
def _subject_of(certificate: str) -> str:
    """Principal of a client certificate: its subject as brokers write it."""
    try:
        from cryptography import x509

        subject = x509.load_pem_x509_certificate(Path(certificate).read_bytes()).subject
    except (ImportError, OSError, ValueError):  # the package comes with the sandbox only
        return f"User:<subject of {certificate}>"
    return f"User:{_as_java_writes_it(subject)}"


def _as_java_writes_it(subject: "Name") -> str:
    """A name as Java's `X500Principal.getName()` has it: RFC 2253, which is stricter than RFC 4514.

    '#' and '=' are escaped wherever they are, and attributes without a keyword of that RFC are hexadecimal.
    """
    return ",".join("+".join(_attribute(each) for each in rdn) for rdn in reversed(subject.rdns))


def _attribute(attribute: "NameAttribute[str | bytes]") -> str:
    keyword, value = attribute.rfc4514_attribute_name, attribute.value
    if keyword[0].isdigit() or isinstance(value, bytes):
        return f"{keyword}=#{_encoded(attribute).hex()}"
    escaped = re.sub(r'[,=+<>#;"\\]', r"\\\g<0>", value)
    ends = re.compile(r"^ +| +$")
    return f"{keyword}={ends.sub(lambda spaces: spaces[0].replace(' ', _ESCAPED_SPACE), escaped)}"


def _encoded(attribute: "NameAttribute[str | bytes]") -> bytes:
    """An attribute's value in DER: what follows the type in a name that consists of nothing else."""
    from cryptography import x509

    pair = x509.Name([attribute]).public_bytes()
    for _ in range(3):  # sequence, set, sequence
        pair = pair[2 + (pair[1] & 0x7F if pair[1] >= 0x80 else 0) :]
    return pair[2 + pair[1] :]


def kafka_acls_line(
    *,
    principal: str,
    bootstrap: str,
    resource_type: str,
    resource_name: str,
    operations: Sequence[str],
    prefixed: bool = False,
) -> str:
    """Command that grants operations on one resource.

    Args:
        principal: whom, as Kafka names it ("User:mirror").
        bootstrap: servers of the cluster.
        resource_type: "topic", "group", "cluster" or "transactional-id", in any case.
        resource_name: its name; of no account for a cluster.
        operations: in Kafka's names ("ALTER_CONFIGS").
        prefixed: the name is the beginning of names.
    """
    parts = ["kafka-acls", "--bootstrap-server", bootstrap, "--add", "--allow-principal", principal]
    for operation in operations:
        parts += ["--operation", "".join(part.capitalize() for part in operation.split("_"))]
    kind = resource_type.lower().replace("_", "-")
    parts += [f"--{kind}"] if kind == "cluster" else [f"--{kind}", resource_name]
    if prefixed:
        parts += ["--resource-pattern-type", "prefixed"]
    return shlex.join(parts)


def rights_error(right: Right, name: str, settings: ClusterSettings, *more: str) -> AuthorizationError:
    """Error for a missing right, naming principal, operation and resource, with the command that grants it.

    Args:
        right: what is missing.
        name: name of the resource; of no account for a cluster.
        settings: cluster that was asked.
        more: further operations that are missing on the same resource.
    """
    operations = [right.operation, *more]
    principal = principal_of(settings)
    target = "the cluster" if right.resource == "cluster" else f"{right.resource} {name}".strip()
    command = kafka_acls_line(
        principal=principal,
        bootstrap=settings.address,
        resource_type=right.resource,
        resource_name=name or "NAME",
        operations=operations,
    )
    return AuthorizationError(
        f"{principal} lacks {', '.join(operations)} on {target} at {settings.address}: grant it with {command}"
    )


def refusal(
    code: int, doing: str, *, right: Right, name: str, settings: ClusterSettings
) -> AuthorizationError | BrokerError:
    """Error for a code a broker answered.

    Args:
        code: Kafka's error code.
        doing: what was being done, for the message.
        right: right the call needs.
        name: name of the resource; of no account for a cluster.
        settings: cluster that was asked.
    """
    if code in _DENIED:
        return rights_error(right, name, settings)
    return codes.broker_error(code, doing)
