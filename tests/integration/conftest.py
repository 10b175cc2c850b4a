"""Fixtures of the tests that need real brokers."""

from collections.abc import Iterator

import pytest

from tests.conftest import Clusters
from tests.helpers.nodes import NodeProcess


@pytest.fixture(scope="module")
def node(clusters: Clusters, tmp_path_factory: pytest.TempPathFactory) -> Iterator[NodeProcess]:
    """A node of this module, as verbose as it can be, that writes to the session's destination.

    Mirrors on it are to be deleted by the test that made them.
    """
    home = tmp_path_factory.mktemp("node")
    process = NodeProcess(home / "state", clusters.destination.bootstrap, log_level="DEBUG")
    try:
        yield process.start()
    finally:
        process.stop()
