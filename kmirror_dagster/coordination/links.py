"""Links of this node: one per mirror, opened when needed, closed when nothing of the mirror is led here."""

import asyncio
import logging
from collections.abc import Callable, Iterable, Mapping

from kmirror_dagster.coordination.ports import Link
from kmirror_dagster.errors import UnknownMirrorError
from kmirror_dagster.records import MirrorRecord

logger = logging.getLogger(__name__)

LinkFactory = Callable[[MirrorRecord], Link]


class LinkPool:
    """All links of a node.

    Args:
        mirrors: stored mirrors, kept current by the view.
        factory: makes a link without touching the network; raises `SettingsError` when the document cannot be
            used on this node (a missing variable, say).
    """

    def __init__(self, mirrors: Mapping[str, MirrorRecord], factory: LinkFactory) -> None:
        self._mirrors = mirrors
        self._factory = factory
        self._links: dict[str, Link] = {}

    def get(self, mirror: str) -> Link:
        """Link of a mirror.

        Raises:
            UnknownMirrorError: when the mirror is not stored (any more).
            SettingsError: when its document cannot be used on this node.
        """
        link = self._links.get(mirror)
        if link is None:
            record = self._mirrors.get(mirror)
            if record is None:
                error = UnknownMirrorError(f"mirror {mirror!r} does not exist, or its record cannot be read")
                error.retriable = True  # its topics are known, so its record is on the way, or to be repaired
                raise error
            link = self._links[mirror] = self._factory(record)
        return link

    def peek(self, mirror: str) -> Link | None:
        """Link of a mirror when it is open."""
        return self._links.get(mirror)

    def open_mirrors(self) -> tuple[str, ...]:
        """Mirrors whose link is open."""
        return tuple(self._links)

    async def close(self, mirrors: Iterable[str], *, deadline_s: float) -> None:
        """Close links; a later `get` opens them anew, with the settings stored then."""
        links = [link for mirror in tuple(mirrors) if (link := self._links.pop(mirror, None)) is not None]
        outcomes = await asyncio.gather(*(link.close(deadline_s) for link in links), return_exceptions=True)
        for outcome in outcomes:
            if isinstance(outcome, BaseException):
                logger.error("closing a link failed", exc_info=outcome)
