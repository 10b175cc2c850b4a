"""The search for planted secrets finds them."""

import base64
from pathlib import Path

import pytest

from tests.helpers.planted import showing

MARK = "hush-never-shown"


@pytest.mark.parametrize("before", ["", "a", "user:", "\0alice\0"])
def test_a_mark_is_found_in_any_form(tmp_path: Path, before: str) -> None:
    """Plain, in base64 whatever is around it, in hexadecimal; and nothing is found where it is not."""
    whole = f"{before}{MARK}-source".encode()
    shown = {
        "plain": whole,
        "base64": base64.b64encode(whole),
        "hex": whole.hex(),
        "nothing": f"{before}hush-always-shown",
    }
    (tmp_path / "deep").mkdir()
    (tmp_path / "deep" / "file").write_bytes(b"\0\xff" + whole)
    (tmp_path / "clean").write_text("clean")
    expected = ["plain", "base64", "hex", str(tmp_path / "deep" / "file")]
    assert showing(MARK, shown, [tmp_path]) == expected
