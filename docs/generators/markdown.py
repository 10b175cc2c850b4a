"""What generated pages are made of."""

from collections.abc import Iterable, Sequence


def head(title: str, origin: str, text: str = "") -> str:
    """Beginning of a page; `origin` is the module that it is written from."""
    note = f"Written by `make docs` from `{origin}`; change that, not this page."
    return "\n\n".join(part for part in (f"# {title}", note, text) if part) + "\n"


def section(title: str, *parts: str, level: int = 2) -> str:
    """A heading and what is below it."""
    return "\n" + "\n\n".join(("#" * level + f" {title}", *(part for part in parts if part))) + "\n"


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table; bars inside cells are escaped."""
    lines = [_row(header), "|" + "---|" * len(header)]
    return "\n".join([*lines, *(_row([_cell(text) for text in row]) for row in rows)])


def paragraphs(docstring: str | None) -> str:
    """A docstring's text: lines joined, without its Google sections and literal-block marks."""
    found: list[str] = []
    for part in (docstring or "").strip().split("\n\n"):
        if part.strip().startswith(("Args:", "Attributes:", "Raises:", "Returns:")):
            break
        found.append(" ".join(line.strip() for line in part.splitlines()))
    return "\n\n".join(found)


def _row(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cells) + " |"


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")
