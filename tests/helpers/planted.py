"""Looking for a planted mark everywhere, also where it was written in another form."""

import base64
from collections.abc import Iterable, Mapping
from pathlib import Path
from urllib.parse import quote


def forms(mark: str) -> list[bytes]:
    """The mark as text, as UTF-16, in hexadecimal and, wherever it begins in what was encoded, in base64."""
    plain = mark.encode()
    found = [plain, mark.encode("utf-16-le"), plain.hex().encode(), quote(mark, safe="").encode()]
    for shift in range(3):
        # the first and the last characters depend on what is around the mark
        encoded = base64.b64encode(b"\0" * shift + plain)
        found.append(encoded[4 if shift else 0 : len(encoded) // 4 * 4 - 4])
    return found


def showing(mark: str, shown: Mapping[str, str | bytes], folders: Iterable[Path]) -> list[str]:
    """Where the mark shows: names of texts, and files below folders.

    Args:
        mark: what nobody may see.
        shown: what was shown, by a name.
        folders: all files in them are read.
    """
    wanted = forms(mark)
    names = [
        name
        for name, content in shown.items()
        if _has(content.encode() if isinstance(content, str) else content, wanted)
    ]
    files = [file for folder in folders for file in sorted(folder.rglob("*")) if file.is_file()]
    return names + [str(file) for file in files if _has(file.read_bytes(), wanted)]


def _has(content: bytes, wanted: list[bytes]) -> bool:
    return any(form in content for form in wanted)
