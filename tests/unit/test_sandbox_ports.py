"""Ports for sandbox brokers."""

import os
import random
import socket
from pathlib import Path

import pytest

from kmirror_dagster.errors import PortInUseError
from kmirror_dagster.sandbox.ports import HOST, PortClaim, is_free, require_free


def test_two_claims_never_share_a_port(tmp_path: Path) -> None:
    """The same random choices in two claims at once give different ports."""
    with (
        PortClaim(tmp_path / "ports", random.Random(1)) as first,
        PortClaim(tmp_path / "ports", random.Random(1)) as second,
    ):
        taken = [first.take() for _ in range(20)]
        others = [second.take() for _ in range(20)]
    assert not set(taken) & set(others)


def test_claims_end(tmp_path: Path) -> None:
    """A port can be claimed again after the block."""
    with PortClaim(tmp_path / "ports", random.Random(2)) as claim:
        port = claim.take()
    with PortClaim(tmp_path / "ports", random.Random(2)) as claim:
        assert claim.take() == port


def test_port_in_use_is_passed_over(tmp_path: Path) -> None:
    """A port that somebody listens on is not given out, and asking for it names the program."""
    with PortClaim(tmp_path / "ports", random.Random(3)) as claim:
        port = claim.take()
    with socket.create_server((HOST, port)):
        assert not is_free(port)
        with PortClaim(tmp_path / "ports", random.Random(3)) as claim:
            assert claim.take() != port
        with pytest.raises(
            PortInUseError, match=rf"port {port} of a test is taken by process {os.getpid()} \("
        ) as e:
            require_free(port, "a test")
        assert e.value.exit_code == 2
    assert is_free(port)
