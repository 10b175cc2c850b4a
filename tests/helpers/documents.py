"""The documentation as tests read it: code blocks, commands and names of tests."""

import re
import shlex
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
_FENCE = re.compile(
    r"^(?P<indent> *)```(?P<language>[a-z]*)[^\n]*\n(?P<text>.*?)^(?P=indent)```", re.M | re.S
)
_INDENTED = re.compile(r"^ {4,}(?:\$ )?(kmirror .*)$", re.M)
_PROMPT = re.compile(r"^[$#] (?=\S)")
_SEPARATORS = {";", "|", "||", "&&", "&", "(", ")"}


@dataclass(frozen=True)
class Block:
    """A fenced block of a page."""

    page: Path
    language: str
    text: str

    def __str__(self) -> str:
        return f"{self.page.relative_to(ROOT)}: {self.text.splitlines()[0]}"


def pages() -> list[Path]:
    """All pages, and the README."""
    return [ROOT / "README.md", *sorted(DOCS.rglob("*.md"))]


def blocks(*languages: str) -> list[Block]:
    """All fenced blocks of these languages."""
    return [
        Block(page, match["language"], textwrap.dedent(match["text"]))
        for page in pages()
        for match in _FENCE.finditer(page.read_text(encoding="utf-8"))
        if match["language"] in languages
    ]


def commands() -> list[tuple[Path, list[str]]]:
    """Every command shown in a console block, and every indented line that begins with `kmirror`."""
    found = [(block.page, words) for block in blocks("console") for words in _prompted(block.text)]
    for page in pages():
        if page.parts[-2:-1] == ("reference",):
            continue  # usage lines, written from the commands themselves
        text = _FENCE.sub("", page.read_text(encoding="utf-8"))
        found += [(page, words) for match in _INDENTED.finditer(text) for words in _split(match[1])]
    return found


def _prompted(text: str) -> Iterator[list[str]]:
    for line in text.replace("\\\n", " ").splitlines():
        if _PROMPT.match(line):
            yield from _split(line[2:])


def _split(line: str) -> Iterator[list[str]]:
    lexer = shlex.shlex(line, posix=True, punctuation_chars=True)
    lexer.whitespace_split = True
    words: list[str] = []
    for word in lexer:
        if word in _SEPARATORS:
            if words:
                yield words
            words = []
        else:
            words.append(word)
    if words:
        yield words
