"""Time budgets: work that must not outlive its tick, whatever the other side does."""

import queue
import threading
from collections.abc import Callable
from typing import TypeVar

from kmirror_dagster.errors import DeadlineError

_T = TypeVar("_T")


def run_within(work: Callable[[], _T], *, budget_s: float, what: str, on_expiry: Callable[[], None]) -> _T:
    """Run blocking work in a thread and give it up when its budget is spent.

    Client timeouts bound each read of a socket, not a call: a peer that trickles bytes keeps one busy for
    ever. Dagster, for its part, does not stop a sensor that is late, it starts another one beside it.

    Args:
        what: names the work in the error.
        on_expiry: called when it is given up; is to make the thread end (close its connection).

    Raises:
        DeadlineError: when the budget is spent first.
    """
    outcome: queue.SimpleQueue[tuple[_T | None, BaseException | None]] = queue.SimpleQueue()

    def body() -> None:
        try:
            outcome.put((work(), None))
        except BaseException as error:  # noqa: BLE001 - handed over to the caller, who raises it
            outcome.put((None, error))

    threading.Thread(target=body, name=f"kmirror {what}", daemon=True).start()
    try:
        result, error = outcome.get(timeout=budget_s)
    except queue.Empty:
        on_expiry()
        raise DeadlineError(f"{what} gave no answer within {budget_s:.0f} s") from None
    if error is not None:
        raise error
    return result  # pyright: ignore[reportReturnType] - None only when the work returned it
