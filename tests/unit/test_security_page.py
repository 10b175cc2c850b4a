"""docs/security.md shows the rights that the check asks for."""

import shlex
from pathlib import Path

from kmirror_dagster.metadata.rights import DESTINATION, SOURCE, Scope, kafka_acls_lines, needs

PAGE = (Path(__file__).parents[2] / "docs" / "security.md").read_text(encoding="utf-8")
SCOPE = Scope(frozenset({"orders"}), frozenset({"orders-app"}), quotas=True)


def shown() -> list[str]:
    """Commands of the page that grant everything."""
    block = PAGE.split("```sh\n")[1].split("```")[0]
    return block.splitlines()


def test_the_commands_are_those_of_the_check() -> None:
    """Line by line what `kmirror check` would print for a principal without any right."""
    expected = [
        line
        for side in (SOURCE, DESTINATION)
        for line in kafka_acls_lines(
            (need for need in needs(SCOPE) if need.side == side),
            principal="User:mirror",
            bootstrap=f"{side}:9093",
        )
    ]
    assert shown() == expected


def test_the_tables_name_every_right() -> None:
    """Each operation the check asks for is in the table of its side, in the row of its kind of resource."""
    source, destination = PAGE.split("At the **source**")[1].split("At the **destination**")
    rows = {
        "TOPIC": "topic",
        "GROUP": "group",
        "CLUSTER": "cluster",
        "TRANSACTIONAL_ID": "transactional ids",
    }
    for need in needs(SCOPE):
        table = source if need.side == SOURCE else destination.split("For a mirror")[0]
        found = [
            line
            for line in table.splitlines()
            if line.startswith("| ")
            and need.operation in line.split("|")[1]
            and rows[need.resource_type] in line
        ]
        assert found, need


def test_the_commands_can_be_pasted() -> None:
    """No line needs a shell to be told what is one word."""
    for line in shown():
        assert shlex.join(shlex.split(line)) == line
