"""The schema registry at the destination, for checks; nothing is written to it."""

from urllib.parse import urlsplit

from pydantic import ConfigDict, Field, SecretStr, field_validator

from kmirror_dagster.settings.base import Settings, dotted, refused


class SchemaRegistrySettings(Settings):
    """Where consumers at the destination look schemas up."""

    model_config = ConfigDict(alias_generator=dotted)

    url: str | None = Field(
        default=None, description="Address of the destination's schema registry; none when not set."
    )
    basic_auth_user_info: SecretStr | None = Field(
        default=None, description="user:password for it, where it asks for one."
    )
    ssl_ca_location: str | None = Field(
        default=None,
        min_length=1,
        description="PEM file of the authority to trust; the system's when not set.",
    )

    @field_validator("url")
    @classmethod
    def _check_url(cls, value: str | None) -> str | None:
        if value is None:
            return None
        parts = urlsplit(value)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise refused("expected an https:// address")
        if parts.username is not None or parts.password is not None:
            raise refused("must not carry credentials: use basic.auth.user.info")
        return value.rstrip("/")
