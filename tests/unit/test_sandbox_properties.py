"""Configuration files of sandbox brokers."""

from pathlib import Path

from kmirror_dagster.sandbox.properties import (
    CLIENT,
    CONTROLLER,
    BrokerPlan,
    ListenerPlan,
    Protocol,
    log4j2_properties,
    render,
    server_properties,
)


def plans(count: int) -> list[BrokerPlan]:
    return [
        BrokerPlan(number, {CLIENT: 20000 + number, CONTROLLER: 21000 + number}, Path(f"/x/broker-{number}"))
        for number in range(1, count + 1)
    ]


def test_single_broker_needs_no_replicas() -> None:
    """Internal topics of a single broker have one replica, and it votes for itself."""
    (broker,) = plans(1)
    properties = server_properties(broker, [broker], [ListenerPlan(CLIENT)], {})
    assert properties["controller.quorum.voters"] == "1@127.0.0.1:21001"
    assert properties["offsets.topic.replication.factor"] == "1"
    assert properties["auto.create.topics.enable"] == "false"
    assert properties["listeners"] == "CLIENT://127.0.0.1:20001,CONTROLLER://127.0.0.1:21001"
    assert properties["advertised.listeners"] == "CLIENT://127.0.0.1:20001"


def test_three_brokers_form_a_quorum() -> None:
    """All three vote, and internal topics are on all of them."""
    brokers = plans(3)
    properties = server_properties(brokers[1], brokers, [ListenerPlan(CLIENT)], {})
    assert properties["node.id"] == "2"
    assert properties["controller.quorum.voters"].count("@") == 3
    assert properties["transaction.state.log.replication.factor"] == "3"
    assert properties["log.dirs"] == "/x/broker-2/data"


def test_everything_listens_on_loopback_only() -> None:
    """No listener is reachable from another machine."""
    brokers = plans(3)
    for broker in brokers:
        listeners = server_properties(broker, brokers, [ListenerPlan(CLIENT)], {})["listeners"]
        assert all("://127.0.0.1:" in listener for listener in listeners.split(","))


def test_overrides_win() -> None:
    """What the owner of a cluster asks for is what the broker gets."""
    (broker,) = plans(1)
    properties = server_properties(
        broker, [broker], [ListenerPlan(CLIENT)], {"auto.create.topics.enable": "true"}
    )
    assert properties["auto.create.topics.enable"] == "true"


def test_listener_has_properties_of_its_own() -> None:
    """A secured listener's settings carry its prefix."""
    (broker,) = plans(1)
    listener = ListenerPlan(CLIENT, Protocol.SASL_PLAINTEXT, {"sasl.enabled.mechanisms": "PLAIN"})
    properties = server_properties(broker, [broker], [listener], {})
    assert properties["listener.name.client.sasl.enabled.mechanisms"] == "PLAIN"
    assert properties["listener.security.protocol.map"] == "CLIENT:SASL_PLAINTEXT,CONTROLLER:PLAINTEXT"


def test_rendering_escapes_what_the_format_reads() -> None:
    """Backslashes, separators, line ends and non-ASCII characters survive Java's properties format."""
    assert render({"a": "x=y:z#!"}) == "a=x\\=y\\:z\\#\\!\n"
    assert render({"a": " b\\c\nd"}) == "a=\\ b\\\\c\\nd\n"
    assert render({"a": "ü€😀"}) == "a=\\u00fc\\u20ac\\ud83d\\ude00\n"


def test_log_goes_to_the_file() -> None:
    """The logging set-up names the log file of its broker."""
    assert "/x/server.log\n" in log4j2_properties(Path("/x/server.log"))
