"""Is the source still the cluster the mirror was made for? Pure."""


def identity_problem(*, expected: str, source: str | None, destination: str | None) -> str | None:
    """Why nothing may be mirrored, None when both clusters are who they should be.

    A source that was replaced under the same address is never accepted: its offsets and topics have nothing
    to do with what has been copied (KIP-1279 section 7, step 1).

    Args:
        expected: cluster id recorded when the mirror was made; empty when the source told none then.
        source: cluster id the source tells now.
        destination: cluster id the destination tells now.
    """
    if source is not None and source == destination:
        return f"source and destination are the same cluster ({source}): check bootstrap.servers of both"
    if expected and source != expected:
        return (
            f"the source is another cluster now (id {source or 'not told'}; the mirror is of {expected}): "
            "point source.bootstrap.servers to the former one, or delete the mirror and create a new one"
        )
    return None


def destination_problem(*, expected: str | None, destination: str | None) -> str | None:
    """Why nothing may be written to the destination, None when it is the one the mirror's state is of.

    A destination that was rebuilt under its address holds none of that state: topics made there by a node of
    the former one would be taken for somebody else's later.

    Args:
        expected: cluster id the mirror's state is kept on, None when that is not checked.
        destination: cluster id the destination tells now.
    """
    if not expected or destination == expected:
        return None
    return (
        f"the destination is another cluster now (id {destination or 'not told'}; this node works for {expected}): "
        "restart the node"
    )
