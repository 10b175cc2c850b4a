"""An event loop whose clock is moved by its timers: waiting takes no time, and a run can be repeated exactly."""

import asyncio
import selectors
from collections.abc import Mapping
from typing import Any

_ENDLESS = 200_000


class _PassingTime(selectors.BaseSelector):
    """Never waits: tells the loop that all the time it would have waited has gone by."""

    def __init__(self) -> None:
        self._inner = selectors.SelectSelector()
        self.passed = 0.0
        self.turns = 0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        self.turns += 1
        assert timeout is not None, "nothing is left that could ever happen"
        assert self.turns < _ENDLESS, "this never ends"
        self.passed += timeout
        return self._inner.select(0)

    def register(self, fileobj: Any, events: int, data: Any = None) -> selectors.SelectorKey:
        return self._inner.register(fileobj, events, data)

    def unregister(self, fileobj: Any) -> selectors.SelectorKey:
        return self._inner.unregister(fileobj)

    def get_map(self) -> Mapping[Any, selectors.SelectorKey]:
        return self._inner.get_map()

    def close(self) -> None:
        self._inner.close()


class VirtualLoop(asyncio.SelectorEventLoop):
    """For code without threads and sockets: sleeps end at once, in the order of their ends."""

    def __init__(self) -> None:
        self._passing = _PassingTime()
        super().__init__(self._passing)

    def time(self) -> float:
        return self._passing.passed
