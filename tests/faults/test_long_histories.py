"""Hundreds of random histories: whatever was written at the source, the destination is the same log."""

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from tests.conftest import Clusters
from tests.helpers.histories import History, histories, random_history
from tests.helpers.mirroring import mirror_history

pytestmark = [pytest.mark.integration, pytest.mark.faults]

_LONG = settings(
    deadline=None,
    database=None,
    phases=[Phase.explicit, Phase.generate, Phase.shrink],
    suppress_health_check=list(HealthCheck),
    print_blob=True,
)


@given(history=st.integers(0, 2**60).map(random_history))
@settings(_LONG, max_examples=150)
def test_histories_that_have_nothing_in_common(clusters: Clusters, history: History) -> None:
    """150 of them, other ones each time."""
    assert mirror_history(clusters, history) == {}


@given(history=histories())
@settings(_LONG, max_examples=80)
def test_histories_that_shrink_to_what_matters(clusters: Clusters, history: History) -> None:
    """80 of them; one that fails is cut down to the operations that matter."""
    assert mirror_history(clusters, history) == {}
