"""Random histories of a source: whatever was written, the destination is the same log."""

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from tests.conftest import Clusters
from tests.helpers.histories import History, random_history
from tests.helpers.mirroring import mirror_history

pytestmark = pytest.mark.integration


@given(history=st.integers(0, 2**40).map(random_history))
@settings(
    max_examples=15,
    deadline=None,
    database=None,
    derandomize=True,
    phases=[Phase.generate],
    suppress_health_check=list(HealthCheck),
)
def test_a_random_history_is_mirrored_as_it_is(clusters: Clusters, history: History) -> None:
    """Same log start, log end and records at both isolation levels, byte for byte."""
    assert mirror_history(clusters, history) == {}
