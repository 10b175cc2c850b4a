"""Waiting for a condition instead of for a time; names that no other test uses."""

import secrets
import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


def wait_until(
    condition: Callable[[], T], deadline_s: float = 30.0, *, what: str = "", poll_s: float = 0.05
) -> T:
    """Ask until the answer is truthy, and return it.

    Args:
        condition: asked again and again; an exception of it ends the wait.
        deadline_s: seconds until the test fails.
        what: what is waited for, for the message.
        poll_s: seconds between two questions.
    """
    deadline = time.monotonic() + deadline_s
    while True:
        answer = condition()
        if answer:
            return answer
        if time.monotonic() >= deadline:
            raise AssertionError(f"not within {deadline_s} s: {what or condition}; last answer {answer!r}")
        time.sleep(poll_s)


def unique_name(stem: str = "t") -> str:
    """A topic, mirror, group or transactional id of this test alone: clusters are shared."""
    return f"{stem}-{secrets.token_hex(4)}"
