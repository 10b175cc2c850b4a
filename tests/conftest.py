"""Fixtures of all tests: real Kafka clusters, started once where they can be shared."""

import os
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from kmirror_dagster.sandbox.cluster import SandboxCluster
from tests.compat.releases import DESTINATION_ENV, SOURCE_ENV, cluster_of
from tests.helpers.proxy import FaultProxy, behind, lead
from tests.helpers.secured import (
    SECRETS,
    SECURITY_VARIABLE,
    SecuredCluster,
    guard_all,
    is_secured,
    new_cluster,
    stored_documents,
    unsecured,
)
from tests.helpers.waiting import unique_name

ClusterFactory = Callable[..., SandboxCluster]


def pytest_addoption(parser: pytest.Parser) -> None:
    """`--secured`: clusters with TLS, SASL and an authorizer, the product with the rights it needs and no more."""
    parser.addoption(
        "--secured", action="store_true", help="run on clusters with TLS, SASL and an authorizer"
    )


def pytest_configure(config: pytest.Config) -> None:
    """Tell helpers and processes that tests start whether clusters are secured."""
    os.environ.update(SECRETS)
    if config.getoption("--secured", default=False):
        os.environ[SECURITY_VARIABLE] = "sasl_tls"


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out what cannot be on secured clusters; its mark says why."""
    if not is_secured():
        return
    left_out = [item for item in items if item.get_closest_marker("unsecured")]
    items[:] = [item for item in items if item not in left_out]
    config.hook.pytest_deselected(items=left_out)


@dataclass(frozen=True)
class Clusters:
    """Source and destination, one broker each, shared by the whole session: use names of your own.

    The proxies lead to the same brokers.
    """

    source: SandboxCluster
    destination: SandboxCluster
    source_proxy: FaultProxy
    destination_proxy: FaultProxy


def start_all(clusters: list[SandboxCluster]) -> None:
    """Start clusters side by side."""
    with ThreadPoolExecutor(len(clusters)) as pool:
        for started in [pool.submit(cluster.start) for cluster in clusters]:
            started.result()


@pytest.fixture(scope="session")
def clusters(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Clusters]:
    """The session's pair of clusters; downloads Kafka's jars the first time on a machine."""
    if is_secured():
        yield from _secured(tmp_path_factory.mktemp("clusters"))
        return
    home = tmp_path_factory.mktemp("clusters")
    with FaultProxy() as source_proxy, FaultProxy() as destination_proxy:
        source = cluster_of("source", home, SOURCE_ENV, listeners=behind(source_proxy))
        destination = cluster_of("destination", home, DESTINATION_ENV, listeners=behind(destination_proxy))
        try:
            start_all([source, destination])
            lead(source_proxy, source)
            lead(destination_proxy, destination)
            yield Clusters(source, destination, source_proxy, destination_proxy)
        finally:
            source.stop(wait_s=5)
            destination.stop(wait_s=5)


def _secured(home: Path) -> Iterator[Clusters]:
    """The same with TLS, SASL and an authorizer; what goes through the proxies is not encrypted."""
    with FaultProxy() as source_proxy, FaultProxy() as destination_proxy:
        source = SecuredCluster("source", home, role="source", proxied=behind(source_proxy)[1])
        destination = SecuredCluster("destination", home, proxied=behind(destination_proxy)[1])
        try:
            start_all([source, destination])
            lead(source_proxy, source)
            lead(destination_proxy, destination)
            with pytest.MonkeyPatch.context() as patch:
                guard_all(patch)
                yield Clusters(source, destination, source_proxy, destination_proxy)
            for cluster in (source, destination):
                documents = stored_documents(cluster.bootstrap)
                assert [each for each in documents if unsecured(each)] == []
        finally:
            source.stop(wait_s=5)
            destination.stop(wait_s=5)


@pytest.fixture
def cluster_factory(tmp_path: Path) -> Iterator[ClusterFactory]:
    """Makes clusters of this test's own: ``cluster_factory("source", brokers=3, overrides={...})``."""
    made: list[SandboxCluster] = []

    def make(
        name: str | None = None,
        brokers: int = 1,
        overrides: Mapping[str, str] | None = None,
        *,
        start: bool = True,
        **more: Any,
    ) -> SandboxCluster:
        cluster = new_cluster(name or unique_name("cluster"), tmp_path, brokers, overrides, **more)
        made.append(cluster)
        if start:
            cluster.start()
        return cluster

    try:
        yield make
    finally:
        for cluster in made:
            cluster.remove()
