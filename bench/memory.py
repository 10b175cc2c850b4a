"""Whether memory stays flat: lowest, highest and trend of the samples behind the warm-up."""

from collections.abc import Sequence
from dataclasses import dataclass

from bench.rounds import WARM_UP, Sample

_KEPT = 120


@dataclass(frozen=True)
class Flatness:
    """Resident memory while a backlog drains, behind its first tenth.

    Attributes:
        samples: how many.
        min_bytes: lowest.
        max_bytes: highest.
        slope_bytes_per_s: of the straight line that fits best.
        growth_bytes: what that line rises by from the first sample to the last.
    """

    samples: int
    min_bytes: int
    max_bytes: int
    slope_bytes_per_s: float
    growth_bytes: float


def flatness(samples: Sequence[Sample]) -> Flatness:
    """Least squares over the samples behind the warm-up.

    Raises:
        ValueError: fewer than two samples there.
    """
    counted = [each for each in samples if each.share >= WARM_UP]
    if len(counted) < 2:
        raise ValueError(f"{len(counted)} samples of memory behind the warm-up: too few")
    mean_s = sum(each.at_s for each in counted) / len(counted)
    mean_bytes = sum(each.rss_bytes for each in counted) / len(counted)
    spread = sum((each.at_s - mean_s) ** 2 for each in counted)
    slope = sum((each.at_s - mean_s) * (each.rss_bytes - mean_bytes) for each in counted) / spread
    return Flatness(
        len(counted),
        min(each.rss_bytes for each in counted),
        max(each.rss_bytes for each in counted),
        slope,
        slope * (counted[-1].at_s - counted[0].at_s),
    )


def thinned(samples: Sequence[Sample]) -> list[tuple[float, float, float]]:
    """At most 120 samples for the results file: seconds, share arrived, megabytes."""
    step = max(1, -(-len(samples) // _KEPT))
    return [
        (round(each.at_s, 1), round(each.share, 3), round(each.rss_bytes / 1e6, 1))
        for each in samples[::step]
    ]
