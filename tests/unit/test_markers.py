"""WriteTxnMarkers packed by hand: the same request as the generated class makes, however entries are grouped."""

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st
from kafka.protocol.producer.transaction import WriteTxnMarkersRequest, WriteTxnMarkersResponse

from kmirror_dagster.broker import markers
from kmirror_dagster.broker.markers import Markers

entries = st.lists(
    st.tuples(
        st.sampled_from(["a", "topic-b", "ü"]), st.integers(0, 200), st.integers(1, 6), st.integers(1, 3)
    ),
    min_size=1,
    max_size=12,
    unique_by=lambda item: item[:2],
)


@given(entries)
def test_each_partition_gets_as_many_markers_as_asked_for(chosen: list[tuple[str, int, int, int]]) -> None:
    """The generated class reads as many abort markers per partition and identity as were asked for."""
    asked = [Markers(topic, partition, number, 7, 1, epoch) for topic, partition, number, epoch in chosen]
    frame = markers.request(asked, correlation_id=5, client_id="test")
    read = WriteTxnMarkersRequest.decode(frame, version=1, header=True, framed=True)
    found: Counter[tuple[str, int, int]] = Counter()
    for marker in read.markers:
        assert (marker.producer_id, marker.producer_epoch, marker.transaction_result) == (7, 1, False)
        for topic in marker.topics:
            for partition in topic.partition_indexes:
                found[topic.name, partition, marker.coordinator_epoch] += 1
    assert found == {(m.topic, m.partition, m.coordinator_epoch): m.number for m in asked}


def test_the_answer_names_what_was_refused() -> None:
    """An error code anywhere in the answer is the partition's."""
    kind = WriteTxnMarkersResponse
    result = kind.WritableTxnMarkerResult
    topic = result.WritableTxnMarkerTopicResult
    partition = topic.WritableTxnMarkerPartitionResult
    answer = kind(
        version=1,
        markers=[
            result(
                producer_id=7,
                topics=[
                    topic(
                        name="a",
                        partitions=[
                            partition(partition_index=0, error_code=0),
                            partition(partition_index=3, error_code=code),
                        ],
                    )
                ],
            )
            for code in (31, 0)
        ],
    )
    answer.with_header(correlation_id=5)
    body = answer.encode(header=True)
    assert markers.answer(memoryview(body)) == {("a", 0): 0, ("a", 3): 31}
