"""What a PromQL expression names: enough of its grammar to compare it with what nodes export."""

import re
from dataclasses import dataclass

# what Prometheus itself puts on every sample of a target
TARGET_LABELS = frozenset({"job", "instance"})

_METRIC = re.compile(r"\b(kmirror[_:][a-z_:]+|process_[a-z_]+|up)\b(?:\{([^}]*)\})?")
_MATCHER = re.compile(r"(\w+)\s*(?:=~|!~|!=|=)")
_GROUPING = re.compile(r"\b(?:by|on|without|ignoring|group_left|group_right)\s*\(([^)]*)\)")
_TEXT = re.compile(r'"[^"]*"')


@dataclass(frozen=True)
class Expression:
    """Names in one expression.

    Attributes:
        metrics: metric -> labels it is selected by.
        grouped: labels that results are grouped or joined by.
    """

    metrics: dict[str, set[str]]
    grouped: set[str]


def read_expression(text: str) -> Expression:
    """Names in an expression."""
    bare = _TEXT.sub('""', text)
    groupings = _GROUPING.findall(bare)
    metrics: dict[str, set[str]] = {}
    for name, matchers in _METRIC.findall(_GROUPING.sub(" ", bare)):
        metrics.setdefault(name, set()).update(_MATCHER.findall(matchers))
    grouped = {label.strip() for group in groupings for label in group.split(",") if label.strip()}
    return Expression(metrics, grouped)
