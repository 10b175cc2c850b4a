"""What a refresher remembers between refreshes; losing it costs another look, never a wrong change."""

import random
from collections.abc import Mapping
from dataclasses import dataclass, field

from kmirror_dagster.metadata.groups import GroupMemory
from kmirror_dagster.metadata.loops import OtherMirrors

# Positions of a group without members expire after a week by default (offsets.retention.minutes, KIP-211).
KEEP_ALIVE_S = 24 * 3600.0
_KEEP_ALIVE_FIRST_S = 3600.0
# A refused configuration may be accepted after a change at the destination's brokers.
REFUSAL_S = 600.0


@dataclass(frozen=True)
class Refusal:
    """A configuration value the destination has refused, when (monotonic seconds) and why."""

    value: str
    reason: str
    at: float


@dataclass
class Memory:
    """State of a refresher between refreshes.

    Attributes:
        missing: topics the last refresh did not find at the source.
        refused: topic -> configuration key -> refusal.
        groups: newest source positions by group.
        exempt: whether no DENY at the destination hits the mirror, and until when that is believed (monotonic
            seconds); None while it was not tried.
        others: mirrors into the source cluster, to recognise loops.
        keep_alive_at: group -> monotonic time at which unchanged positions are committed again.
    """

    missing: frozenset[str] = frozenset()
    refused: dict[str, dict[str, Refusal]] = field(default_factory=dict[str, dict[str, Refusal]])
    groups: dict[str, GroupMemory] = field(default_factory=dict[str, GroupMemory])
    others: OtherMirrors = field(default_factory=OtherMirrors)
    exempt: tuple[bool, float] | None = None
    keep_alive_at: dict[str, float] = field(default_factory=dict[str, float])

    def refused_lately(self, topic: str, now: float) -> Mapping[str, Refusal]:
        """Refusals of one topic that are not worth another try yet."""
        kept = {k: r for k, r in self.refused.get(topic, {}).items() if now - r.at < REFUSAL_S}
        if kept:
            self.refused[topic] = kept
        else:
            self.refused.pop(topic, None)
        return kept

    def keep_alive_due(self, group: str, now: float, rng: random.Random) -> bool:
        """Tell whether a group's positions are to be committed again though unchanged.

        The first time is drawn at random, so that restarts neither bunch the groups nor put them off for
        ever.
        """
        due = self.keep_alive_at.setdefault(group, now + rng.uniform(_KEEP_ALIVE_FIRST_S, KEEP_ALIVE_S))
        return now >= due

    def kept_alive(self, group: str, now: float) -> None:
        """Take in that all of a group's positions were just committed."""
        self.keep_alive_at[group] = now + KEEP_ALIVE_S

    def forget_groups(self, existing: frozenset[str]) -> None:
        """Drop what is remembered of groups that are gone."""
        self.groups = {name: memory for name, memory in self.groups.items() if name in existing}
        self.keep_alive_at = {name: at for name, at in self.keep_alive_at.items() if name in existing}
