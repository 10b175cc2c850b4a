"""A Dockerfile's instructions, stage by stage."""

import json
import re
from dataclasses import dataclass, field
from pathlib import Path


@dataclass
class Stage:
    """One stage.

    Attributes:
        name: name after AS.
        base: image or stage it begins with.
        instructions: (keyword, arguments), line ends joined.
    """

    name: str
    base: str
    instructions: list[tuple[str, str]] = field(default_factory=list[tuple[str, str]])

    def all(self, keyword: str) -> list[str]:
        """Arguments of every instruction of a kind."""
        return [arguments for found, arguments in self.instructions if found == keyword]

    def command(self, keyword: str) -> list[str]:
        """The last CMD or ENTRYPOINT, in its JSON form."""
        return json.loads(self.all(keyword)[-1])


def read_dockerfile(path: Path) -> tuple[dict[str, str], dict[str, Stage]]:
    """Global build arguments and stages of a Dockerfile."""
    lines = [line for line in path.read_text(encoding="utf-8").splitlines() if not line.startswith("#")]
    text = re.sub(r"\\\n\s*", " ", "\n".join(lines))
    arguments: dict[str, str] = {}
    stages: dict[str, Stage] = {}
    stage: Stage | None = None
    for line in filter(None, (line.strip() for line in text.splitlines())):
        keyword, _, rest = line.partition(" ")
        if keyword == "FROM":
            base, name = re.fullmatch(r"(\S+) AS (\S+)", rest).groups()  # type: ignore[union-attr]
            stage = stages[name] = Stage(name, base)
        elif stage is None:
            name, _, value = rest.partition("=")
            arguments[name] = value
        else:
            stage.instructions.append((keyword, rest))
    return arguments, stages
