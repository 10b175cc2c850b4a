"""What is tried with what, and the page that says how it went."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from pydantic import BaseModel

from tests.compat.releases import NEWEST, VERSIONS

# Copying, resuming, transactions, codecs, foreign writes; kills in mid-copy; topics, configurations, groups, log
# starts.
CORE = (
    "tests/integration/test_replication.py",
    "tests/integration/test_end_to_end.py::test_three_kills_in_mid_copy_lose_and_repeat_nothing",
    "tests/integration/test_metadata_topics.py::test_configurations_are_part_of_the_creation",
    "tests/integration/test_metadata_topics.py::test_added_partitions_appear_within_one_refresh",
    "tests/integration/test_metadata_groups.py::test_zero_no_commit_and_a_number_stay_apart",
    "tests/integration/test_metadata_groups.py::test_log_starts_are_followed_and_only_while_mirroring",
    "tests/integration/test_metadata_groups.py::test_a_compacted_topic_with_a_cut_head_gets_its_policy_when_aligned",
    "tests/integration/test_cases_data.py::test_a_tombstone_deletes_on_both_sides",
)
# Old releases as a source matter most: people migrate away from them.
PAIRS = (
    *((version, NEWEST) for version in VERSIONS),
    (NEWEST, NEWEST),
    *((NEWEST, version) for version in VERSIONS if not version.startswith("2.")),
)
PYTHONS = ("3.10", "3.11", "3.12", "3.13")
UNIT = ("tests/unit",)
DAGSTER = ("tests/unit/test_dagster_*.py", "tests/unit/test_documentation.py")


class Outcome(BaseModel):
    """How one combination went.

    Attributes:
        kind: kafka, python or dagster.
        what: the combination, in words.
        passed: tests that passed.
        failed: names of tests that failed, or why none could be run.
        seconds: how long it took.
    """

    kind: str
    what: str
    passed: int = 0
    failed: list[str] = []
    seconds: float = 0.0

    @property
    def is_good(self) -> bool:
        """Whether everything passed, and something did."""
        return self.passed > 0 and not self.failed


class Results(BaseModel):
    """All outcomes of the newest run of each combination."""

    outcomes: dict[str, Outcome] = {}

    def put(self, outcome: Outcome) -> None:
        """Take the place of an older outcome of the same combination."""
        self.outcomes[f"{outcome.kind} {outcome.what}"] = outcome

    def of(self, kind: str) -> list[Outcome]:
        """Outcomes of one kind, in the order they were put."""
        return [each for each in self.outcomes.values() if each.kind == kind]


@dataclass(frozen=True)
class Page:
    """docs/compatibility.md, from results."""

    results: Results
    core: Sequence[str] = field(default=CORE)

    def text(self) -> str:
        """The whole page."""
        return "\n\n".join(
            [_HEAD, self._kafka(), _FAILED_HEAD, self._failed(), self._python(), self._dagster(), _TAIL]
        )

    def _kafka(self) -> str:
        rows = ["| source | destination | core tests |", "|---|---|---|"]
        found = {each.what: each for each in self.results.of("kafka")}
        for source, destination in PAIRS:
            outcome = found.get(f"{source} to {destination}")
            verdict = _verdict(outcome) if outcome else "not run yet"
            rows.append(f"| {_named(source)} | {_named(destination)} | {verdict} |")
        return "\n".join(rows)

    def _failed(self) -> str:
        found = [
            f"- {each.what}: `{name}`" for each in self.results.outcomes.values() for name in each.failed[:5]
        ]
        return "\n".join(found) if found else "None in the run that this page is from."

    def _python(self) -> str:
        return self._plain("python", "## Python", "Python", "`make compat` runs all unit tests on each.")

    def _dagster(self) -> str:
        text = (
            "The lowest release that is allowed and the newest, with the unit tests of everything Dagster's."
        )
        return self._plain("dagster", "## Dagster", "Dagster", text)

    def _plain(self, kind: str, title: str, column: str, text: str) -> str:
        rows = [f"| {each.what} | {_verdict(each)} |" for each in self.results.of(kind)]
        return "\n".join([title, "", text, "", f"| {column} | tests |", "|---|---|", *rows])


_HEAD = """\
# Compatibility

Written by `make compat`, which runs the combinations below, from what it saw.

## Apache Kafka

Real brokers of each release, from Maven Central by pinned SHA-256, one broker a cluster. The core: every codec,
transactions, aborted records, log starts, resuming, foreign writes, three kills amid 500,000 records, creation with
configurations, growth, group positions, compacted topics. Releases before 3.3 run with a ZooKeeper, later ones with
KRaft; all of them on Java 25, which the sandbox brings."""
_FAILED_HEAD = "### What failed"
_TAIL = """\
## Not tried

Brokers of other makers (see [settings for them](howto/clusters.md)); sources before 2.8; macOS and Windows."""


def _named(version: str) -> str:
    return f"{version} (ZooKeeper)" if tuple(map(int, version.split(".")[:2])) < (3, 3) else version


def _verdict(outcome: Outcome) -> str:
    if outcome.is_good:
        return f"{outcome.passed} passed"
    if outcome.passed or outcome.failed:
        return f"{outcome.passed} passed, **{len(outcome.failed)} failed**"
    return "**none could be run**"
