"""Recorders write down what clients do."""

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kmirror_dagster.verification.history import Ack, Assign, EndTransaction, Fail, Poll, Send, read_history
from kmirror_dagster.verification.history_checker import check_history
from kmirror_dagster.verification.history_recorder import HistoryWriter, RecordedConsumer, RecordedProducer


class FakeProducer:
    """Acknowledges or refuses at the next poll."""

    def __init__(self) -> None:
        self.waiting: list[tuple[Callable[[Any, Any], None], Any, Any]] = []
        self.error: Any = None
        self.offset = 0

    def produce(self, topic: str, *, on_delivery: Callable[[Any, Any], None], **_: Any) -> None:
        if self.error == "full":
            raise BufferError("queue full")
        offset = self.offset
        self.offset += 1
        message = SimpleNamespace(partition=lambda: 0, offset=lambda: offset)
        self.waiting.append((on_delivery, self.error, message))

    def poll(self, timeout: float = 0) -> int:
        waiting, self.waiting = self.waiting, []
        for told, error, message in waiting:
            told(error, message)
        return len(waiting)

    def flush(self, timeout: float = 0) -> int:
        self.poll()
        return 0

    def begin_transaction(self) -> None: ...

    def commit_transaction(self, timeout: float = 0) -> None:
        if self.error == "commit":
            raise RuntimeError("timed out")

    def abort_transaction(self, timeout: float = 0) -> None: ...


class FakeConsumer:
    """Gives the messages it was made with."""

    def __init__(self, messages: list[Any]) -> None:
        self.messages = messages
        self.closed = False

    def subscribe(self, topics: list[str], *, on_assign: Callable[[Any, Any], None]) -> None:
        on_assign(self, [SimpleNamespace(topic=topic, partition=0, offset=-1001) for topic in topics])

    def assign(self, partitions: Any) -> None: ...

    def consume(self, num_messages: int = 1, timeout: float = 0) -> list[Any]:
        messages, self.messages = self.messages, []
        return messages

    def close(self) -> None:
        self.closed = True


def message(offset: int, value: str, error: Any = None) -> Any:
    """One message as the client gives it."""
    return SimpleNamespace(
        topic=lambda: "t",
        partition=lambda: 0,
        offset=lambda: offset,
        value=value.encode,
        error=lambda: error,
    )


def test_sends_and_acknowledgements(tmp_path: Path) -> None:
    """A send is written before its acknowledgement, both can be checked from the file."""
    file = tmp_path / "history"
    client = FakeProducer()
    with HistoryWriter(file) as history:
        recorded = RecordedProducer(client, history, cluster="A", process="p")
        recorded.send("t", "a")
        recorded.send("t", "b", partition=0)
        assert recorded.flush(1.0) == 0
        consumer = RecordedConsumer(
            FakeConsumer([message(0, "a"), message(9, "", "eof"), message(1, "b")]),
            history,
            cluster="A",
            process="c",
        )
        consumer.subscribe(["t"])
        consumer.assign([SimpleNamespace(topic="t", partition=0, offset=0)])
        assert len(consumer.poll(0.1)) == 2
        assert consumer.poll(0.1) == []
        consumer.close()
    events = list(read_history(file))
    assert [type(event) for event in events] == [Send, Send, Ack, Ack, Assign, Assign, Poll]
    assert check_history(events, complete=["A"]).ok


def test_unknown_and_certain_failures() -> None:
    """What the client took may be written all the same; what it refused is not."""
    history = HistoryWriter()
    client = FakeProducer()
    recorded = RecordedProducer(client, history, cluster="A", process="p")
    client.error = "timed out"
    recorded.send("t", "a")
    recorded.poll()
    client.error = "full"
    with pytest.raises(BufferError):
        recorded.send("t", "b")
    failures = [event for event in history.events if isinstance(event, Fail)]
    assert [(f.value, f.certain) for f in failures] == [("a", False), ("b", True)]


def test_transactions() -> None:
    """Sends carry their transaction; an outcome nobody knows is not written down."""
    history = HistoryWriter()
    client = FakeProducer()
    recorded = RecordedProducer(client, history, cluster="A", process="p")
    for end in (recorded.commit, recorded.abort):
        recorded.begin()
        recorded.send("t", end.__name__)
        end(1.0)
    recorded.begin()
    recorded.send("t", "c")
    client.error = "commit"
    with pytest.raises(RuntimeError):
        recorded.commit(1.0)
    sends = [event.transaction for event in history.events if isinstance(event, Send)]
    ends = [(e.op, e.transaction) for e in history.events if isinstance(e, EndTransaction)]
    assert sends == ["p-1", "p-2", "p-3"]
    assert ends == [("commit", "p-1"), ("abort", "p-2")]
