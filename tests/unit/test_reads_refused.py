"""What a broker refuses to show names the right that is missing, and the command that grants it."""

import asyncio
from types import SimpleNamespace
from typing import Any, cast

import pytest

from kmirror_dagster.broker import codes
from kmirror_dagster.broker.reads import topic_config
from kmirror_dagster.broker.wire import WireCluster
from kmirror_dagster.errors import AuthorizationError, BrokerError
from kmirror_dagster.settings import ClusterSettings


def asked(code: int) -> None:
    """Ask for a setting of a topic; the broker answers with a code."""

    async def go() -> None:
        settings = ClusterSettings.model_validate({"bootstrap.servers": "destination:9092"})
        cluster = WireCluster(settings, role="destination")

        async def answer(request: Any) -> Any:
            return SimpleNamespace(results=[SimpleNamespace(error_code=code, configs=[])])

        cast(Any, cluster).any_call = answer
        await topic_config(cluster, "orders", "max.message.bytes")

    asyncio.run(go())


def test_a_setting_that_may_not_be_read_names_the_right() -> None:
    """Principal, operation, topic and command; other codes stay the broker's own error."""
    with pytest.raises(
        AuthorizationError, match="lacks DESCRIBE_CONFIGS on topic orders at destination:9092"
    ):
        asked(codes.TOPIC_AUTHORIZATION_FAILED)
    with pytest.raises(BrokerError, match="of topic orders at the destination cluster: UNKNOWN_TOPIC"):
        asked(codes.UNKNOWN_TOPIC_OR_PARTITION)
