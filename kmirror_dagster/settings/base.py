"""What all settings models share: frozen, strict about names, two spellings of every dotted name."""

from pydantic import BaseModel, ConfigDict
from pydantic_core import PydanticCustomError


class Settings(BaseModel):
    """Base of all settings: frozen, unknown names refused, inputs never part of an error's text.

    Every setting may be written by its documented name (`bootstrap.servers`) or by its attribute's
    (`bootstrap_servers`), not by both.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", populate_by_name=True, hide_input_in_errors=True)


def dotted(attribute: str) -> str:
    """Kafka's property name of an attribute: `bootstrap_servers` -> `bootstrap.servers`."""
    return attribute.replace("_", ".")


def refused(reason: str, *, setting: str | None = None) -> PydanticCustomError:
    """Build the error that a validator raises.

    Args:
        reason: what is wrong and how to put it right, without the value: it may be a secret. A reason that
            begins with "expected" is reported with the value as written, unless that is a secret.
        setting: documented name of the setting at fault when a whole section is validated.
    """
    return PydanticCustomError("refused", "{reason}", {"reason": reason, "setting": setting})
