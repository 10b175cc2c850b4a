"""Log lines as JSON objects, one a line, with mirror, topic and partition as fields of their own."""

import json
import logging
import sys
import time
from typing import TextIO

_FIELDS = ("mirror", "topic", "partition", "error")


class JsonFormatter(logging.Formatter):
    """Formats a record as one line of JSON."""

    def __init__(self, node_id: str) -> None:
        super().__init__()
        self._node_id = node_id

    def format(self, record: logging.LogRecord) -> str:
        """One line; a traceback is part of it, with its line ends escaped."""
        second = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        entry: dict[str, object] = {
            "time": f"{second}.{int(record.msecs):03d}Z",
            "level": record.levelname,
            "logger": record.name,
            "message": record.getMessage(),
            "node": self._node_id,
            "pid": record.process,
        }
        for name in _FIELDS:
            value = getattr(record, name, None)
            if value is not None:
                entry[name] = value
        if record.exc_info:
            entry["trace"] = self.formatException(record.exc_info)
        return json.dumps(entry, default=str, ensure_ascii=False)


def set_up_logging(node_id: str, *, level: int = logging.INFO, stream: TextIO | None = None) -> None:
    """Send all logging of this process to `stream` (stderr) as JSON."""
    handler = logging.StreamHandler(stream or sys.stderr)
    handler.setFormatter(JsonFormatter(node_id))
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level)
    for noisy in ("httpx", "httpcore", "kafka", "uvicorn.access"):
        logging.getLogger(noisy).setLevel(logging.WARNING)
    logging.captureWarnings(True)
