"""TLS towards the API."""

import ssl
from pathlib import Path


def verifying_context(ca: Path | None) -> ssl.SSLContext:
    """Context that verifies certificate and host name.

    Args:
        ca: PEM file of authorities to trust, or of the very certificate a node shows; None for the system's
            authorities.
    """
    context = ssl.create_default_context(cafile=ca)
    # a node announces its own certificate to clients on its machine: that one is trusted without its issuer
    context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
    return context
