"""How much memory fetched records may take."""

import asyncio


class Budget:
    """Bytes a node may hold in receive buffers, all mirrors together; readers wait while they are used up.

    One answer of each fetch loop may come on top: it was asked for while there was room.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.used = 0
        self._free = asyncio.Event()
        self._free.set()

    def take(self, size: int) -> None:
        """Count a received answer."""
        self.used += size
        if self.used >= self.limit:
            self._free.clear()

    def give(self, size: int) -> None:
        """Count a buffer that came back."""
        self.used -= size
        if self.used < self.limit:
            self._free.set()

    async def wait(self) -> None:
        """Wait until there is room."""
        await self._free.wait()
