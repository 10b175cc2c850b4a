"""Applying plans: keys a destination refuses, errors kept apart, what a refresher remembers."""

import random
from collections.abc import Mapping, Sequence

import pytest

from kmirror_dagster.broker.admin import ClusterAdmin
from kmirror_dagster.broker.admin_types import ConfigChange, NewTopic
from kmirror_dagster.errors import AuthorizationError, BrokerError, DeadlineError, KmirrorError
from kmirror_dagster.metadata.application import alter_configs, create_topics, is_existing
from kmirror_dagster.metadata.memory import KEEP_ALIVE_S, REFUSAL_S, Memory, Refusal
from kmirror_dagster.metadata.outcome import Step
from kmirror_dagster.metadata.steps import StepReports
from kmirror_dagster.settings import ClusterSettings


class PickyAdmin(ClusterAdmin):
    """A destination that refuses configuration keys, naming them or not."""

    def __init__(
        self, *, refuses: Mapping[str, str], errors: Mapping[str, KmirrorError] | None = None
    ) -> None:
        super().__init__(ClusterSettings(bootstrap_servers=("127.0.0.1:1",)))
        self.refuses = refuses
        self.errors = errors or {}
        self.created: dict[str, Mapping[str, str]] = {}
        self.changed: dict[str, ConfigChange] = {}
        self.calls = 0

    def refusal(self, configs: Mapping[str, str]) -> KmirrorError | None:
        """Error for the first key that is refused."""
        for key, message in self.refuses.items():
            if key in configs:
                return BrokerError(40, "INVALID_CONFIG", message)
        return None

    def create_topics(
        self, topics: Sequence[NewTopic], *, validate_only: bool = False, timeout_s: float | None = None
    ) -> Mapping[str, KmirrorError | None]:
        """Create what is not refused."""
        self.calls += 1
        outcomes = {
            topic.name: self.errors.get(topic.name) or self.refusal(topic.configs) for topic in topics
        }
        if not validate_only:
            self.created |= {topic.name: topic.configs for topic in topics if outcomes[topic.name] is None}
        return outcomes

    def alter_configs(
        self, changes: Mapping[str, ConfigChange], *, timeout_s: float | None = None
    ) -> Mapping[str, KmirrorError | None]:
        """Change what is not refused."""
        self.calls += 1
        outcomes = {name: self.errors.get(name) or self.refusal(each.sets) for name, each in changes.items()}
        self.changed |= {name: each for name, each in changes.items() if outcomes[name] is None}
        return outcomes


@pytest.mark.case("C19")
@pytest.mark.parametrize(
    "message",
    ["Unknown topic config name: b.key", "Invalid value 2 for configuration b.key: no", "somehow wrong"],
)
def test_a_topic_is_created_without_the_key_that_is_refused(message: str) -> None:
    """Named in the message or found out by asking about each alone: the rest is created in one request."""
    admin = PickyAdmin(refuses={"b.key": message})
    topics = [
        NewTopic("t", 1, 1, {"a.key": "1", "b.key": "2", "c.key": "3"}),
        NewTopic("u", 1, 1, {"a.key": "1"}),
    ]

    outcomes = create_topics(admin, topics, timeout=lambda: 1.0)

    assert admin.created == {"t": {"a.key": "1", "c.key": "3"}, "u": {"a.key": "1"}}
    assert outcomes["t"].error is None
    assert list(outcomes["t"].refused) == ["b.key"]
    assert not outcomes["u"].refused


@pytest.mark.case("C19")
def test_several_refused_keys_are_all_left_out() -> None:
    """Brokers name one key at a time."""
    admin = PickyAdmin(refuses={"a.key": "bad a.key", "c.key": "bad c.key"})
    configs = {"a.key": "1", "b.key": "2", "c.key": "3"}

    created = create_topics(admin, [NewTopic("t", 1, 1, configs)], timeout=lambda: 1.0)
    altered = alter_configs(admin, {"t": ConfigChange(configs, ("d.key",))}, timeout=lambda: 1.0)

    assert admin.created["t"] == {"b.key": "2"}
    assert admin.changed["t"] == ConfigChange({"b.key": "2"}, ("d.key",))
    assert set(created["t"].refused) == set(altered["t"].refused) == {"a.key", "c.key"}


def test_a_change_of_which_nothing_is_left_makes_no_further_request() -> None:
    """The only key is refused, without a name: reported, done."""
    admin = PickyAdmin(refuses={"a.key": "somehow wrong"})

    outcomes = alter_configs(admin, {"t": ConfigChange({"a.key": "1"})}, timeout=lambda: 1.0)

    assert (admin.calls, admin.changed) == (1, {})
    assert list(outcomes["t"].refused) == ["a.key"]


def test_no_topic_is_created_whose_timestamps_would_be_rewritten() -> None:
    """The timestamp type is never left out, the creation fails instead."""
    admin = PickyAdmin(refuses={"message.timestamp.type": "bad message.timestamp.type"})

    outcomes = create_topics(
        admin, [NewTopic("t", 1, 1, {"message.timestamp.type": "CreateTime", "a": "1"})], timeout=lambda: 1.0
    )

    assert admin.created == {}
    assert outcomes["t"].error is not None


def test_an_older_destination_gets_the_one_timestamp_limit_it_knows() -> None:
    """Refusing one of the two newer limits replaces both."""
    name = "message.timestamp.before.max.ms"
    admin = PickyAdmin(refuses={name: f"Unknown topic config name: {name}"})
    configs = {name: "9", "message.timestamp.after.max.ms": "9", "a": "1"}

    create_topics(admin, [NewTopic("t", 1, 1, configs)], timeout=lambda: 1.0)

    assert admin.created["t"] == {"message.timestamp.difference.max.ms": str(2**63 - 1), "a": "1"}


@pytest.mark.case("C30")
def test_one_topic_s_error_leaves_the_others_alone() -> None:
    """A missing right or an existing topic is that topic's outcome; the others are created."""
    exists = BrokerError(36, "TOPIC_ALREADY_EXISTS", "exists")
    admin = PickyAdmin(refuses={}, errors={"t": AuthorizationError("lacks CREATE"), "u": exists})

    outcomes = create_topics(admin, [NewTopic(name, 1, 1) for name in "tuv"], timeout=lambda: 1.0)

    assert isinstance(outcomes["t"].error, AuthorizationError)
    assert is_existing(outcomes["u"].error)
    assert outcomes["v"].error is None
    assert set(admin.created) == {"v"}


@pytest.mark.case("C27")
def test_a_step_that_fails_does_not_reach_the_next(caplog: pytest.LogCaptureFixture) -> None:
    """Expected errors and faults of ours alike stay in their step's report; faults are logged with a traceback."""
    reports = StepReports()
    for step, error in ((Step.CONFIGS, DeadlineError("slow")), (Step.GROUPS, ZeroDivisionError("oops"))):
        with reports.running(step):
            raise error
    with reports.running(Step.LOG_STARTS) as report:
        report.changes = 2
        report.notes.extend(f"note {index}" for index in range(60))

    by_step = {status.step: status for status in reports.statuses()}
    assert by_step["configs"].errors == {"*": "slow"}
    assert "ZeroDivisionError: oops" in by_step["groups"].errors["*"]
    assert "Traceback" in caplog.text
    assert (by_step["log-starts"].ok, by_step["log-starts"].changes) == (True, 2)
    assert by_step["log-starts"].notes[-1] == "and 10 more"
    assert [status.step for status in reports.statuses()] == [str(step) for step in Step]


@pytest.mark.case("E7")
def test_the_first_keeping_alive_is_neither_at_once_nor_late() -> None:
    """After a start positions are committed again within a day, not in the first hour; then daily."""
    rng = random.Random(3)
    for group in map(str, range(100)):
        memory = Memory()
        assert not memory.keep_alive_due(group, 0.0, rng)
        assert not memory.keep_alive_due(group, 3599.0, rng)
        assert memory.keep_alive_due(group, KEEP_ALIVE_S, rng)
        memory.kept_alive(group, KEEP_ALIVE_S)
        assert not memory.keep_alive_due(group, 2 * KEEP_ALIVE_S - 1, rng)
        memory.forget_groups(frozenset())
        assert memory.keep_alive_at == {}


def test_a_refusal_is_worth_another_try_after_a_while() -> None:
    """Refusals are remembered for some minutes: the destination's brokers may have been changed."""
    memory = Memory(refused={"t": {"a": Refusal("1", "no", 0.0)}})

    assert "a" in memory.refused_lately("t", REFUSAL_S - 1)
    assert memory.refused_lately("t", REFUSAL_S) == {}
    assert memory.refused == {}
