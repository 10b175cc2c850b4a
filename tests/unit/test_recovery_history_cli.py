"""`kmirror history check`."""

import json
from pathlib import Path

from kmirror_dagster.verification.history import Ack, Event, Poll, PolledRecord, Send, event_line
from tests.helpers.command_line import kmirror, refused

EVENTS: list[Event] = [
    Send(process="p", cluster="A", topic="t", value="a"),
    Ack(cluster="A", topic="t", partition=0, offset=0, value="a"),
    Poll(process="c", cluster="B", records=[PolledRecord("t", 0, 0, "a")]),
]


def written(tmp_path: Path, events: list[Event]) -> str:
    """File of a history."""
    file = tmp_path / "history.jsonl"
    file.write_text("\n".join(event_line(event) for event in events))
    return str(file)


def test_clean_history_is_exit_code_0(tmp_path: Path) -> None:
    """A history without anomalies is told in figures."""
    result = kmirror("history", "check", written(tmp_path, EVENTS), "--complete", "B")
    assert result.exit_code == 0, result.output
    assert "anomalies             0" in result.output


def test_anomaly_is_exit_code_1(tmp_path: Path) -> None:
    """An anomaly is listed, as JSON too, and ends the command with 1."""
    file = written(tmp_path, EVENTS[:2])
    result = kmirror("history", "check", file)
    assert "unseen" in result.output
    assert result.exit_code == 1
    assert "1 anomalies found" in result.stderr
    document = json.loads(kmirror("history", "check", file, "--json").stdout)
    assert document["ok"] is False
    assert document["anomalies_by_kind"] == {"unseen": 1}


def test_malformed_history_is_exit_code_2(tmp_path: Path) -> None:
    """What is no history is named with its line."""
    file = tmp_path / "broken"
    file.write_text('{"op": "nothing"}')
    assert "broken:1" in refused(kmirror("history", "check", str(file)))
