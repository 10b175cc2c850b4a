"""A record as one reads it from a log, as a plain tuple: readers handle hundreds of thousands a second."""

from typing import Final, TypeAlias

Headers: TypeAlias = list[tuple[str, bytes | None]]
# (offset, timestamp type, timestamp in ms, key, value, headers); no headers at all are None
LogRecord: TypeAlias = tuple[int, int, int, bytes | None, bytes | None, Headers | None]

# positions within a LogRecord
OFFSET: Final = 0
TIMESTAMP_TYPE: Final = 1
TIMESTAMP: Final = 2
KEY: Final = 3
VALUE: Final = 4
HEADERS: Final = 5

# timestamp types as librdkafka numbers them; 0 stands for none
CREATE_TIME: Final = 1
LOG_APPEND_TIME: Final = 2
