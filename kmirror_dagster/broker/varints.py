"""Unsigned varints and tagged fields of flexible protocol versions (KIP-482)."""


def uvarint(view: memoryview, position: int) -> tuple[int, int]:
    """One unsigned varint and the position behind it."""
    byte = view[position]
    position += 1
    if byte < 0x80:
        return byte, position
    result, shift = byte & 0x7F, 7
    while True:
        byte = view[position]
        position += 1
        result |= (byte & 0x7F) << shift
        if byte < 0x80:
            return result, position
        shift += 7


def append_uvarint(out: bytearray, value: int) -> None:
    """Append an unsigned varint."""
    while value >= 0x80:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)


def skip_tags(view: memoryview, position: int) -> int:
    """Position behind a set of tagged fields that are not looked at."""
    count, position = uvarint(view, position)
    for _ in range(count):
        _, position = uvarint(view, position)
        size, position = uvarint(view, position)
        position += size
    return position
