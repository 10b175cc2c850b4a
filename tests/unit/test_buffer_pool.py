"""Reuse of receive buffers."""

from kmirror_dagster.broker.connection import BufferPool

MIB = 1024 * 1024


def test_large_buffers_are_kept_rather_than_small_ones() -> None:
    """Many small answers do not push out the buffers that are dear to make."""
    pool = BufferPool(keep_bytes=8 * MIB)
    large = [pool.acquire(4 * MIB) for _ in range(2)]
    small = [pool.acquire(1) for _ in range(8)]
    for buffer in [*small, *large]:
        pool.release(buffer)
    assert {id(pool.acquire(4 * MIB)) for _ in range(2)} == {id(each) for each in large}


def test_the_smallest_that_fits_is_taken() -> None:
    """A small answer leaves the large buffer to a large one."""
    pool = BufferPool(keep_bytes=8 * MIB)
    large, small = pool.acquire(4 * MIB), pool.acquire(1)
    pool.release(large)
    pool.release(small)
    assert pool.acquire(10) is small
    assert pool.acquire(10) is large


def test_no_more_is_kept_than_allowed() -> None:
    """What is released beyond the limit is given up."""
    pool = BufferPool(keep_bytes=2 * MIB)
    for buffer in [pool.acquire(MIB) for _ in range(5)] + [pool.acquire(3 * MIB)]:
        pool.release(buffer)
    assert sum(map(len, pool.free)) == 2 * MIB
