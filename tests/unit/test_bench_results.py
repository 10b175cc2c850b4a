"""The benchmark's figures: ratios, percentiles, trend of memory, the results file and the page made of it."""

import json
from pathlib import Path

import pytest

from bench import report, results
from bench.latency import LatencyRound, percentile
from bench.memory import flatness, thinned
from bench.mirrors import CEILING, MIRROR_MAKER, OURS
from bench.rounds import Round, Sample
from bench.workloads import FULL, QUICK


def made(tool: str, seconds: float, cpu_s: float = 1.0, peak: int = 100) -> Round:
    """A round of 1,000 records."""
    return Round(tool, 1_000, seconds, cpu_s, peak, 0.0, 0.0)


def at_rate(tool: str, p50_ms: float, p99_ms: float) -> LatencyRound:
    """A round at a steady rate."""
    return LatencyRound(tool, 1_000, 1.0, 1.0, 100, 0.0, 0.0, p50_ms, p99_ms, p99_ms)


def test_ratios_are_ours_by_theirs() -> None:
    """Medians count; more records a second is a higher ratio, less processor and memory a lower one."""
    rounds = [
        made(OURS, 1.0, 0.1, 10),
        made(MIRROR_MAKER, 4.0, 1.0, 100),
        made(CEILING, 0.5),
        made(OURS, 1.0, 0.1, 10),
        made(MIRROR_MAKER, 4.0, 1.0, 100),
        made(CEILING, 0.5),
    ]
    found = results.throughput(FULL["bulk"], rounds)
    assert (found["throughput_ratio"], found["cpu_ratio"], found["memory_ratio"]) == (4.0, 0.1, 0.1)
    assert found["ceiling_ratio"] == 0.5
    assert len(found["rounds"]) == 6


def test_one_tool_alone_has_no_ratios() -> None:
    """A run of one tool says so instead of inventing a comparison."""
    found = results.throughput(FULL["tiny"], [made(OURS, 1.0)])
    assert found["throughput_ratio"] is None
    assert "ceiling_ratio" not in found


def test_delay_is_compared_with_none() -> None:
    """Each tool is measured against itself as well."""
    near = [made(OURS, 1.0), made(MIRROR_MAKER, 4.0)]
    found = results.wan(FULL["wan"], [made(OURS, 1.25), made(MIRROR_MAKER, 8.0)], near)
    assert found["of_own_zero_ms_ratio"] == 0.8
    assert found["mirrormaker2_of_own_zero_ms_ratio"] == 0.5
    assert found["throughput_ratio"] == 6.4


def test_latency_is_told_of_both() -> None:
    """Milliseconds by tool, medians over the rounds."""
    rounds = [at_rate(OURS, 5, 10), at_rate(MIRROR_MAKER, 20, 40), at_rate(OURS, 7, 20)]
    found = results.latency(FULL["latency"], rounds)
    assert found["p50_ms"] == {OURS: 6, MIRROR_MAKER: 20}
    assert found["p99_ms"] == {OURS: 15, MIRROR_MAKER: 40}
    assert "throughput_ratio" not in found


@pytest.mark.parametrize(("share", "expected"), [(0.5, 50), (0.99, 99), (1.0, 100), (0.0, 1)])
def test_percentile_is_a_value_that_was_measured(share: float, expected: int) -> None:
    """Nearest rank."""
    assert percentile(range(1, 101), share) == expected


def test_trend_of_memory_leaves_the_warm_up_out() -> None:
    """What is taken before a tenth has arrived is no growth; a steady rise is."""
    start = [Sample(0, 0, 10), Sample(1, 0.05, 500)]
    flat = flatness([*start, *(Sample(second, 0.2, 1_000) for second in range(2, 10))])
    assert (flat.min_bytes, flat.max_bytes, flat.slope_bytes_per_s, flat.growth_bytes) == (1_000, 1_000, 0, 0)
    rising = flatness([*start, *(Sample(second, 0.2, 1_000 + 10 * second) for second in range(2, 10))])
    assert rising.slope_bytes_per_s == pytest.approx(10)
    assert rising.growth_bytes == pytest.approx(70)


def test_trend_needs_samples() -> None:
    """One sample is no trend."""
    with pytest.raises(ValueError, match="too few"):
        flatness([Sample(0, 0, 10), Sample(1, 0.5, 10)])


def test_many_samples_are_thinned() -> None:
    """The results file stays short."""
    assert len(thinned([Sample(second, 0, 0) for second in range(1_000)])) <= 120


def test_partial_runs_are_merged(tmp_path: Path) -> None:
    """A run of one workload replaces that one and leaves the others."""
    path = tmp_path / "results" / "latest.json"
    results.write(path, {"bulk": {"x": 1}, "tiny": {"x": 2}}, quick=False)
    results.write(path, {"bulk": {"x": 3}}, quick=True)
    found = json.loads(path.read_text())["workloads"]
    assert (found["bulk"]["x"], found["bulk"]["quick"]) == (3, True)
    assert (found["tiny"]["x"], found["tiny"]["quick"]) == (2, False)


def test_figures_of_another_machine_are_dropped(tmp_path: Path) -> None:
    """One file never mixes machines."""
    path = tmp_path / "latest.json"
    results.write(path, {"bulk": {}}, quick=False)
    document = json.loads(path.read_text())
    document["machine"]["cores"] += 1
    path.write_text(json.dumps(document))
    results.write(path, {"tiny": {}}, quick=False)
    assert list(json.loads(path.read_text())["workloads"]) == ["tiny"]


def test_page_shows_every_workload_and_what_was_missed(tmp_path: Path) -> None:
    """All workloads have a section; the machine, how to repeat it and missed aims are on the page."""
    both = [made(OURS, 1.0, 0.05, 10), made(MIRROR_MAKER, 4.0), made(CEILING, 0.5)]
    samples = [Sample(second, 0.5, 1_000_000) for second in range(5)]
    path = tmp_path / "latest.json"
    measured = {
        **{name: results.throughput(FULL[name], both) for name in ("bulk", "tiny", "eos")},
        "wan": results.wan(FULL["wan"], both, both),
        "latency": results.latency(FULL["latency"], [at_rate(OURS, 5, 10), at_rate(MIRROR_MAKER, 20, 40)]),
        "backlog": results.backlog(FULL["backlog"], both[0], samples),
    }
    assert set(measured) == set(FULL)
    results.write(path, measured, quick=False)
    page = tmp_path / "page.md"
    assert report.main(["--results", str(path), "--output", str(page)]) == 0
    text = page.read_text()
    assert all(f"## {name}" in text for name in FULL)
    assert results.machine()["cpu"] in text
    assert "make bench" in text
    assert "≥ 2.5: met" in text
    assert "≥ 0.8: **missed**" in text
    assert "below 50 ms: met" in text


def test_page_needs_results(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Without results the remedy is named."""
    assert report.main(["--results", str(tmp_path / "none.json")]) == 1
    assert "make bench" in capsys.readouterr().err


def test_quick_differs_in_size_only() -> None:
    """Quick runs measure the same kinds of data."""
    for name, quick in QUICK.items():
        full = FULL[name]
        assert quick.records < full.records
        assert (quick.value_bytes, quick.batch_records, quick.codec, quick.transactional, quick.delay_ms) == (
            full.value_bytes,
            full.batch_records,
            full.codec,
            full.transactional,
            full.delay_ms,
        )
