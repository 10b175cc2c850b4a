"""Clusters of the tests that let in nobody but known principals, with just the rights docs/security.md lists.

With `pytest --secured` (or KMIRROR_TEST_SECURITY=sasl_tls) the clusters that tests share and make are such: TLS, SASL
and an authorizer. The product gets in as one of two users without any right but those of its role. The tests' own
clients use the listener that the brokers have for themselves, on which everybody is a super user.

What is known of running clusters lies in an environment variable, so that processes a test starts know it too.
"""

import argparse
import json
import os
import re
import shlex
import string
import threading
from collections.abc import Collection, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import pytest

from kmirror_dagster.broker.admin import ClusterAdmin
from kmirror_dagster.broker.admin_types import Acl
from kmirror_dagster.metadata.refresh import Refresher
from kmirror_dagster.metadata.rights import DESTINATION, SOURCE, Scope, needs
from kmirror_dagster.records import STATE_TOPIC
from kmirror_dagster.recovery.drill import TOPIC_PREFIX as DRILL_PREFIX
from kmirror_dagster.replication.link import MirrorLink
from kmirror_dagster.sandbox.cluster import START_S, SandboxCluster
from kmirror_dagster.sandbox.properties import CLIENT, HOST, INTERNAL, ListenerPlan, Protocol
from kmirror_dagster.sandbox.security import ClusterSecurity, User, certificate_folder
from kmirror_dagster.settings import ClusterSettings, MirrorSettings
from tests.helpers.kafka import DEADLINE_S, admin, consume
from tests.helpers.waiting import wait_until

Role = Literal["source", "destination"]

SECURITY_VARIABLE = "KMIRROR_TEST_SECURITY"
_KNOWN_VARIABLE = "TEST_SECURED_CLUSTERS"
# in each secret of the tests, so that one search finds them all
MARK = "hush-never-shown"
SECRETS = {
    "TEST_SOURCE_PASSWORD": f"{MARK}-source",
    "TEST_DESTINATION_PASSWORD": f"{MARK}-destination",
}
_VARIABLES: dict[Role, str] = {
    "source": "TEST_SOURCE_PASSWORD",
    "destination": "TEST_DESTINATION_PASSWORD",
}
USERS: dict[Role, User] = {
    role: User(f"mirror-{role}", SECRETS[variable]) for role, variable in _VARIABLES.items()
}
# topics and groups have names of their own in each test
EVERYTHING = Scope(frozenset({"*"}), frozenset({"*"}), quotas=True)


_registering = threading.Lock()


def is_secured() -> bool:
    """Whether clusters of the tests are to be secured."""
    return os.environ.get(SECURITY_VARIABLE) == "sasl_tls"


@dataclass(frozen=True)
class Entrance:
    """How a cluster is entered.

    Attributes:
        own: bootstrap address for the tests' own clients.
        properties: Kafka client properties of the product by its role, secrets as ${NAME}.
    """

    own: str
    properties: Mapping[str, Mapping[str, str]]


def _known() -> dict[str, Any]:
    return json.loads(os.environ.get(_KNOWN_VARIABLE, "{}"))


def register(addresses: Sequence[str], entrance: Entrance) -> None:
    """Make known how the cluster behind some addresses is entered."""
    content = {"own": entrance.own, "properties": {k: dict(v) for k, v in entrance.properties.items()}}
    with _registering:  # clusters are started side by side
        os.environ[_KNOWN_VARIABLE] = json.dumps(_known() | dict.fromkeys(addresses, content))


def client_properties(bootstrap: str, role: Role) -> dict[str, str]:
    """Kafka client properties of the product, as a document has them: secrets as ${NAME}.

    Args:
        bootstrap: address of any listener of the cluster.
        role: what the cluster is to the mirror.
    """
    known = _known().get(bootstrap)
    return {"bootstrap.servers": bootstrap} if known is None else dict(known["properties"][role])


def client_settings(bootstrap: str, role: Role, **more: Any) -> ClusterSettings:
    """Settings of the product, secrets filled in."""
    filled = {
        key: string.Template(value).substitute(SECRETS)
        for key, value in client_properties(bootstrap, role).items()
    }
    return ClusterSettings.model_validate({**filled, **more})


def own_bootstrap(bootstrap: str) -> str:
    """Address for the tests' own clients of the cluster behind an address."""
    known = _known().get(bootstrap)
    return bootstrap if known is None else str(known["own"])


def own_settings(cluster: SandboxCluster) -> ClusterSettings:
    """Settings for the tests' own clients."""
    return ClusterSettings.model_validate({"bootstrap.servers": cluster.bootstrap})


def unsecured(document: Mapping[str, Any]) -> list[str]:
    """Sides of a mirror (or node) whose cluster is a secured one and is entered without its users.

    Args:
        document: settings by side, in Kafka's property names.
    """
    found: list[str] = []
    for side in ("source", "destination"):
        properties = document.get(side) or {}
        addresses = properties.get("bootstrap.servers", "")
        first = addresses.split(",")[0] if isinstance(addresses, str) else addresses[0]
        named = {user.name for user in USERS.values()}
        if first in _known() and properties.get("sasl.username") not in named:
            found.append(f"{side} {first}")
    return found


def guard(settings: MirrorSettings) -> None:
    """Fail a test whose mirror would run on a secured cluster as somebody who may do everything.

    Raises:
        AssertionError: naming the side.
    """
    document = settings.model_dump(by_alias=True, include={"source", "destination"})
    assert not unsecured(document), f"mirror {settings.mirror} runs without security: {unsecured(document)}"


def guard_all(patch: pytest.MonkeyPatch) -> None:
    """Look at each mirror that this process copies or refreshes."""
    for room in (MirrorLink, Refresher):
        begin = room.__init__

        def guarded(self: Any, settings: MirrorSettings, *rest: Any, begin: Any = begin, **more: Any) -> None:
            guard(settings)
            begin(self, settings, *rest, **more)

        patch.setattr(room, "__init__", guarded)


def stored_documents(bootstrap: str) -> list[dict[str, Any]]:
    """Documents of all mirrors that nodes have ever stored on a cluster."""
    found = admin(bootstrap).list_topics(timeout=DEADLINE_S).topics.get(STATE_TOPIC)
    partitions = range(0 if found is None else len(found.partitions))
    values = [each.value for n in partitions for each in consume(bootstrap, STATE_TOPIC, n)]
    loaded = [json.loads(value) for value in values if value and value.startswith(b"{")]
    return [each["document"] for each in loaded if "document" in each]


def granted(scope: Scope, role: Role, user: str) -> list[Acl]:
    """The ACLs that `kmirror check` asks for, of one side, for a user."""
    side = {"source": SOURCE, "destination": DESTINATION}[role]
    return [
        Acl(n.resource_type, n.resource_name, n.pattern_type, f"User:{user}", "*", n.operation, "ALLOW")
        for n in needs(scope)
        if n.side == side
    ]


def give(admin: ClusterAdmin, acls: Collection[Acl]) -> None:
    """Create ACLs and wait until they are listed."""
    assert set(admin.create_acls(sorted(acls)).values()) <= {None}
    wait_until(lambda: admin.acls() >= set(acls))


class SecuredCluster(SandboxCluster):
    """A cluster with TLS, SCRAM and an authorizer. `bootstrap` is for the tests' own clients.

    Args:
        role: what `settings` speaks for.
        scope: what the product may do from the beginning, in either role.
        proxied: a further listener without TLS, whose frames a proxy can read.
        more: as of a `SandboxCluster`.
    """

    def __init__(
        self,
        name: str,
        home: Path,
        brokers: int = 1,
        overrides: Mapping[str, str] | None = None,
        *,
        role: Role = "destination",
        scope: Scope | None = EVERYTHING,
        proxied: ListenerPlan | None = None,
        **more: Any,
    ) -> None:
        self.security = ClusterSecurity(
            Protocol.SASL_SSL, "SCRAM-SHA-512", tuple(USERS.values()), authorizer=True
        )
        super().__init__(name, home, brokers, overrides, security=self.security, **more)
        self._role: Role = role
        self._scope = scope
        self._proxied = proxied

    @property
    def bootstrap(self) -> str:
        """Address of the brokers' own listener, on which everybody is a super user."""
        return self.bootstrap_of(INTERNAL)

    def client_properties(self, user: str | None = None) -> Mapping[str, str]:
        """As a user, by default the one of this cluster's role; holds passwords."""
        properties = super().client_properties(user or USERS[self._role].name)
        return {**properties, "bootstrap.servers": self.bootstrap_of(CLIENT)}

    def _listeners(self) -> tuple[ListenerPlan, ...]:
        listeners = self.security.listeners(certificate_folder(self.home))
        if self._proxied is None:
            return listeners
        sasl = {key: value for key, value in (listeners[-1].properties or {}).items() if "sasl" in key}
        return (*listeners, replace(self._proxied, protocol=Protocol.SASL_PLAINTEXT, properties=sasl))

    def start(self, wait_s: float = START_S, **more: Any) -> None:
        """Start it, with users and their rights, also where it comes up anew and empty."""
        super().start(wait_s, **more)
        self.security.create_users(self.bootstrap)
        if self._scope is not None:
            self.allow(self._scope)
        entrance = self._entrance(self.bootstrap_of(CLIENT), Protocol.SASL_SSL)
        register([self.bootstrap, self.bootstrap_of(CLIENT)], entrance)
        if self._proxied is not None:
            address = f"{self._proxied.advertised_host or HOST}:{self._proxied.advertised_port}"
            register([address], self._entrance(address, Protocol.SASL_PLAINTEXT))

    def allow(self, scope: Scope, *roles: Role) -> None:
        """Give the users of roles (both, when none is named) the rights for a scope, and wait until they count."""
        wanted = {
            acl
            for role in (roles or ("source", "destination"))
            for acl in granted(scope, role, USERS[role].name)
        }
        admin = ClusterAdmin(own_settings(self))
        try:
            give(admin, wanted)
        finally:
            admin.close()

    def _entrance(self, address: str, protocol: Protocol) -> Entrance:
        properties: dict[str, dict[str, str]] = {}
        for role, user in USERS.items():
            known = dict(self.client_properties(user.name))
            known |= {"bootstrap.servers": address, "security.protocol": protocol.value}
            known["sasl.password"] = f"${{{_VARIABLES[role]}}}"
            if not protocol.is_tls:
                del known["ssl.ca.location"]
            properties[role] = known
        return Entrance(self.bootstrap, properties)


@contextmanager
def allowed(cluster: SandboxCluster, acls: Collection[Acl]) -> Generator[None, None, None]:
    """While the block runs a cluster has some more ACLs; nothing on one that is not secured."""
    if not isinstance(cluster, SecuredCluster):
        yield
        return
    admin = ClusterAdmin(own_settings(cluster))
    try:
        added = set(acls) - admin.acls()
        give(admin, added)
        try:
            yield
        finally:
            admin.delete_acls(sorted(added))
    finally:
        admin.close()


@contextmanager
def way_back(
    source: SandboxCluster, destination: SandboxCluster, scope: Scope = EVERYTHING
) -> Generator[None, None, None]:
    """While the block runs a mirror may be turned round: clusters exchanged, each entered by whom it was before."""
    writes = allowed(source, granted(scope, "destination", USERS["source"].name))
    reads = allowed(destination, granted(scope, "source", USERS["destination"].name))
    with writes, reads:
        yield


def rehearsal_rights() -> list[Acl]:
    """What docs/security.md lists for drills: at the source, for the topics they make there."""
    principal = f"User:{USERS['source'].name}"
    return [
        Acl("TOPIC", DRILL_PREFIX, "PREFIXED", principal, "*", operation, "ALLOW")
        for operation in ("CREATE", "WRITE", "DELETE")
    ]


def new_cluster(
    name: str,
    home: Path,
    brokers: int = 1,
    overrides: Mapping[str, str] | None = None,
    *,
    role: Role = "destination",
    **more: Any,
) -> SandboxCluster:
    """A cluster of a test, secured when all are to be and the test says nothing of security or listeners."""
    if is_secured() and not {"security", "listeners"} & more.keys():
        return SecuredCluster(name, home, brokers, overrides, role=role, **more)
    return SandboxCluster(name, home, brokers, overrides, **more)


def acls_of(line: str) -> list[Acl]:
    """ACLs that a `kafka-acls` command makes."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--bootstrap-server", required=True)
    parser.add_argument("--add", action="store_true", required=True)
    parser.add_argument("--allow-principal", required=True)
    parser.add_argument("--operation", action="append", required=True)
    parser.add_argument("--resource-pattern-type", default="literal")
    resource = parser.add_mutually_exclusive_group(required=True)
    resource.add_argument("--cluster", action="store_true")
    for kind in ("--topic", "--group", "--transactional-id"):
        resource.add_argument(kind)
    command, *words = shlex.split(line)
    assert command == "kafka-acls"
    given = parser.parse_args(words)
    named = {"TOPIC": given.topic, "GROUP": given.group, "TRANSACTIONAL_ID": given.transactional_id}
    kind, name = next(((kind, name) for kind, name in named.items() if name), ("CLUSTER", "kafka-cluster"))
    pattern = given.resource_pattern_type.upper()
    operations = [re.sub(r"(?<!^)(?=[A-Z])", "_", each).upper() for each in given.operation]
    return [Acl(kind, name, pattern, given.allow_principal, "*", each, "ALLOW") for each in operations]


def advised(text: str) -> list[str]:
    """The `kafka-acls` commands that a message ends its sentences with."""
    return [line.strip() for line in re.findall(r"kafka-acls --bootstrap-server [^;\n]*", text)]
