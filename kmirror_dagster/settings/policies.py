"""What a mirror does where there is a choice: where to start, what loss means, when to fail over."""

from datetime import datetime, timezone
from typing import Literal

from pydantic import Field, SerializerFunctionWrapHandler, field_validator, model_serializer, model_validator

from kmirror_dagster.settings.base import Settings, refused
from kmirror_dagster.settings.filters import check_pattern, matches_any

_START_FORM = "expected earliest, latest or {timestamp: ...}"


class StartPolicy(Settings):
    """Where mirroring of a new topic begins: `earliest`, `latest` or `{timestamp: 2026-01-31T00:00:00Z}`.

    Offsets are the source's in each case.
    """

    at: Literal["earliest", "latest", "timestamp"] = Field(default="earliest", description="Kind of start.")
    timestamp: datetime | None = Field(
        default=None, description="First record at or after this time (ISO-8601 with its offset from UTC)."
    )

    @model_validator(mode="before")
    @classmethod
    def _from_document(cls, value: object) -> object:
        if isinstance(value, str):
            if value.lower() not in ("earliest", "latest"):
                raise refused(_START_FORM)
            return {"at": value.lower()}
        if isinstance(value, dict):
            if set(value) == {"timestamp"}:
                return {"at": "timestamp", "timestamp": value["timestamp"]}
            if set(value) <= {"at", "timestamp"}:
                return value
        if isinstance(value, StartPolicy):
            return value
        raise refused(_START_FORM)

    @field_validator("timestamp", mode="before")
    @classmethod
    def _text_only(cls, value: object) -> object:
        # pydantic would take a number for seconds or milliseconds, depending on its size
        if value is not None and not isinstance(value, (str, datetime)):
            raise refused("expected a time such as 2026-01-31T00:00:00Z")
        return value

    @model_validator(mode="after")
    def _check(self) -> "StartPolicy":
        if (self.at == "timestamp") != (self.timestamp is not None):
            raise refused(_START_FORM)
        if self.timestamp is not None and self.timestamp.tzinfo is None:
            raise refused("needs its offset from UTC: append Z, or +01:00 and the like", setting="timestamp")
        return self

    @model_serializer(mode="wrap")
    def _as_document(self, handler: SerializerFunctionWrapHandler) -> str | dict[str, str]:
        if self.timestamp is None:
            return self.at
        return {"timestamp": self.timestamp.astimezone(timezone.utc).isoformat()}

    @property
    def timestamp_ms(self) -> int | None:
        """Start time in epoch milliseconds; None for earliest and latest."""
        return None if self.timestamp is None else round(self.timestamp.timestamp() * 1_000)


class FailoverSettings(Settings):
    """When the failover sensor acts. It is switched on and off in Dagster and is off by default."""

    bad_observations: int = Field(
        default=5,
        ge=1,
        le=3_600,
        description="Failed looks at the source in a row, one per second, before acting.",
    )
    probe_quorum: int = Field(
        default=1,
        ge=1,
        le=1_000,
        description="Nodes that have to agree that the source is down; Dagster looks as well.",
    )
    cool_down_seconds: int = Field(
        default=600,
        ge=0,
        le=604_800,
        description="Time after a failover in which no other one of the mirror is made.",
    )
    max_destination_lag_seconds: float | None = Field(
        default=None,
        gt=0,
        description="No failover on its own when more than this may be lost; policies.rpo_seconds when not set.",
    )
    approval: Literal["none", "required"] = Field(
        default="none",
        description="required: once everything speaks for a failover, a person has to approve it by the job "
        "approve_failover.",
    )
    dry_run: bool = Field(
        default=False, description="The failover sensor says what it would do and does nothing."
    )


class PolicySettings(Settings):
    """Choices of one mirror."""

    start: StartPolicy = Field(
        default_factory=StartPolicy,
        description="Where a new topic begins: earliest, latest or {timestamp: ...}.",
    )
    source_log_start_beyond_cursor: Literal["stop", "skip-to-start"] = Field(
        default="stop",
        description="The source deleted records before they were mirrored. stop: the partition is FAILED, "
        "naming the lost offsets; skip-to-start: the loss is recorded, copying goes on behind it.",
    )
    adopt_topics: list[str] = Field(
        default_factory=list,
        description="Names of topics that exist at the destination with the beginning of the source's log and are "
        "gone on with instead of being refused (failback sets it once it has compared both logs).",
    )
    read_only: Literal["auto", "off"] = Field(
        default="auto",
        description="Who may write to copies while they are mirrored. auto: permissions to write are held back "
        "until stop, and everybody is denied to write where the mirror is a super user; off: ACLs as the "
        "source has them, writes by others are noticed afterwards.",
    )
    config_drift: Literal["keep", "revert"] = Field(
        default="keep",
        description="Configurations that somebody set on a copy and the source has not. keep: they stay, and are "
        "listed; revert: they are removed, except what topic.properties.exclude names.",
    )
    client_quotas: Literal["auto", "off"] = Field(
        default="auto",
        description="Client quotas. auto: as the source has them, where they may be read there; off: the "
        "destination's own.",
    )
    replication_factor: int | None = Field(
        default=None,
        ge=1,
        le=32_767,
        description="Replicas of created topics; not set: the source's, at most the brokers there are.",
    )
    max_hole_records: int = Field(
        default=10_000_000,
        ge=0,
        le=9_007_199_254_740_991,
        description="Longest run of offsets without a readable record that is filled; beyond it: FAILED, or left out "
        "where offsets are translated.",
    )
    offsets: Literal["exact", "translated"] = Field(
        default="exact",
        description="Longer runs of offsets without a record. exact: FAILED, naming the figure; translated: they are "
        "left out, offsets behind them differ by that much, exactly mapped ('kmirror offsets').",
    )
    translated_topics: list[str] = Field(
        default_factory=list,
        description="Whole-name RE2 patterns of topics whose offsets are translated though `offsets` is exact.",
    )
    rpo_seconds: float = Field(
        default=60.0, gt=0, le=31_536_000, description="Lag in seconds above which the lag check fails."
    )
    max_lag_records: int | None = Field(
        default=None,
        ge=0,
        description="Lag in records above which the lag check fails; no limit when not set.",
    )
    failover: FailoverSettings = Field(
        default_factory=FailoverSettings, description="When the failover sensor acts, once it is switched on."
    )

    @field_validator("translated_topics")
    @classmethod
    def _are_patterns(cls, value: list[str]) -> list[str]:
        for pattern in value:
            check_pattern(pattern)
        return value

    @property
    def never_translates(self) -> bool:
        """Whether offsets of no topic at all may come to differ."""
        return self.offsets == "exact" and not self.translated_topics

    def may_translate(self, topic: str) -> bool:
        """Whether offsets of a topic may come to differ between source and destination."""
        return self.offsets == "translated" or matches_any(self.translated_topics, topic)
