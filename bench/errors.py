"""Errors of the benchmark."""

from kmirror_dagster.errors import KmirrorError


class BenchError(KmirrorError):
    """Error when a measurement cannot be had; the message says of what and where to look."""
