"""Why a client has no connection: librdkafka tells it through a callback, calls themselves only time out."""

import logging
import re
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from confluent_kafka import KafkaError

from kmirror_dagster.errors import AuthenticationError, ClusterUnreachableError
from kmirror_dagster.settings import ClusterSettings

# Longer than the longest wait between two connection attempts at default settings: a cause that persists is
# always in sight, one that is gone is soon forgotten.
RECENT_S = 30.0

_REFUSED = frozenset(
    {
        KafkaError._AUTHENTICATION,  # noqa: SLF001 - librdkafka's names of local errors begin with an underscore
        KafkaError.SASL_AUTHENTICATION_FAILED,
        KafkaError.UNSUPPORTED_SASL_MECHANISM,
        KafkaError.ILLEGAL_SASL_STATE,
    }
)
_CONNECTION = _REFUSED | {
    KafkaError._SSL,  # noqa: SLF001
    KafkaError._TRANSPORT,  # noqa: SLF001
    KafkaError._RESOLVE,  # noqa: SLF001
    KafkaError._TIMED_OUT,  # noqa: SLF001
}

# A broker that goes down in mid-handshake makes errors of the same codes: those pass.
_PASSING = re.compile(
    r"transport failure|disconnected(?!: connecting to)|connection reset|timed out|broken pipe", re.I
)
_TRUST = re.compile(r"certificate|verify|plaintext broker listener|wrong version|alert", re.I)

# The same for the token endpoint, in the words of libcurl.
_PROVIDER_DOWN = re.compile(r"failed to connect|could not (?:connect|resolve)|timeout|empty reply", re.I)

_PREFIX = re.compile(r"^(?:\w+://)?\S+:\d+/\w+: ")
_SUFFIX = re.compile(r"\s*\((?:after \d+ms|\d+ identical)[^)]*\).*$")
# An identity provider's answer: nothing but its error code is for people and logs.
_BODY = re.compile(r'(?:: )?\{(?:.*?"error"\s*:\s*"([\w.-]{1,60})")?.*$', re.S)
_CONNECT = re.compile(r"^Connect to \S+ failed: ")


def short_reason(text: str) -> str:
    """Shorten librdkafka's text of an error: no broker's name, no timing, small first letter."""
    text = _BODY.sub(lambda match: f": {match[1]}" if match[1] else "", text)
    reason = _CONNECT.sub("", _SUFFIX.sub("", _PREFIX.sub("", " ".join(text.split()))))
    return reason if reason[1:2].isupper() else reason[:1].lower() + reason[1:]


def credentials_refused(
    settings: ClusterSettings, reason: str = "", *, address: str | None = None
) -> AuthenticationError:
    """Build the error for refused credentials: who, where, and which settings to look at."""
    where = address or settings.address
    detail = f" ({reason})" if reason else ""
    if settings.sasl_mechanism == "OAUTHBEARER":
        return AuthenticationError(
            f"SASL authentication failed for client {settings.sasl_oauthbearer_client_id!r} at {where}"
            f"{detail}: check sasl.oauthbearer.client.id, .client.secret, .scope and .token.endpoint.url"
        )
    if settings.uses_sasl:
        return AuthenticationError(
            f"SASL authentication failed for user {settings.sasl_username!r} at {where}{detail}: "
            "check sasl.username and sasl.password"
        )
    return AuthenticationError(f"{where} refused the connection{detail}: check security.protocol")


def tls_refused(settings: ClusterSettings, reason: str, *, address: str | None = None) -> AuthenticationError:
    """Build the error for a TLS handshake in which one side does not trust the other."""
    files = (
        "ssl.ca.location, ssl.certificate.location"
        if settings.ssl_certificate_location
        else "ssl.ca.location"
    )
    return AuthenticationError(
        f"TLS handshake with {address or settings.address} failed ({reason}): "
        f"check security.protocol and {files}"
    )


def setup_failed(
    settings: ClusterSettings, reason: str, *, address: str
) -> AuthenticationError | ClusterUnreachableError:
    """Build the error for a broker that ended a connection while it was being set up.

    Args:
        settings: cluster that was asked.
        reason: what happened, with the address.
        address: the broker as host:port.
    """
    if settings.uses_tls and _TRUST.search(reason):
        return tls_refused(settings, reason, address=address)
    files = " and ssl.*" if settings.uses_tls else ""
    return ClusterUnreachableError(
        f"{reason} while it was being set up: check that {address} is a listener for "
        f"security.protocol {settings.security_protocol}{files}"
    )


def unreachable(
    settings: ClusterSettings, reason: str, *, role: str = "", deadline_s: float | None = None
) -> ClusterUnreachableError:
    """Build the error for a cluster that does not answer.

    Args:
        settings: cluster that was asked.
        reason: newest known reason, "" when there is none.
        role: "source" or "destination", "" when it is not known.
        deadline_s: seconds waited.
    """
    cluster = f"{role} cluster" if role else "cluster"
    within = "" if deadline_s is None else f" within {deadline_s:g} s"
    return ClusterUnreachableError(
        f"cannot reach {cluster} at {settings.address}{within}: {reason or 'no answer'}; "
        "check bootstrap.servers and that a broker is running"
    )


def _is_provider_down(error: KafkaError) -> bool:
    text = error.str()
    return error.code() in _REFUSED and "OAUTHBEARER token" in text and bool(_PROVIDER_DOWN.search(text))


@dataclass(frozen=True)
class _Noted:
    error: AuthenticationError | None
    reason: str
    at: float


class ConnectionErrors:
    """Newest connection errors of one client; `note` is its error callback. Safe to share between threads."""

    def __init__(self, settings: ClusterSettings, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._settings = settings
        self._clock = clock
        self._lock = threading.Lock()
        self._newest: _Noted | None = None
        self._refusal: _Noted | None = None

    def note(self, error: KafkaError) -> None:
        """Take one error in (called by librdkafka while the client is polled)."""
        if error.code() not in _CONNECTION:
            return  # "all brokers down" repeats, without the reason, what was said before
        reason = short_reason(error.str())
        refusal: AuthenticationError | None = None
        if not _PASSING.search(error.str()) and not _is_provider_down(error):
            if error.code() in _REFUSED:
                refusal = credentials_refused(self._settings, reason)
            elif self._settings.uses_tls and _TRUST.search(error.str()):
                refusal = tls_refused(self._settings, reason)
        noted = _Noted(refusal, reason, self._clock())
        with self._lock:
            self._newest = noted
            if refusal is not None:
                self._refusal = noted

    def refusal(self) -> AuthenticationError | None:
        """Refused credentials or certificates of the last `RECENT_S` seconds, None when there are none."""
        with self._lock:
            return self._refusal.error if self._refusal and self._is_recent(self._refusal) else None

    def reason(self) -> str:
        """Newest reason of the last `RECENT_S` seconds, "" when there is none."""
        with self._lock:
            return self._newest.reason if self._newest and self._is_recent(self._newest) else ""

    def error(self) -> AuthenticationError | ClusterUnreachableError | None:
        """What keeps the client from connecting, None when nothing was heard of lately."""
        reason = self.reason()
        return self.refusal() or (unreachable(self._settings, reason) if reason else None)

    def _is_recent(self, noted: _Noted) -> bool:
        return self._clock() - noted.at <= RECENT_S


class RepeatFilter(logging.Filter):
    """Lets one of many equal log lines through per interval; librdkafka logs every attempt to connect.

    Args:
        interval_s: seconds for which a line that differs in numbers only is held back.
        clock: monotonic seconds.
    """

    def __init__(self, interval_s: float = RECENT_S, *, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__()
        self._interval_s = interval_s
        self._clock = clock
        self._lock = threading.Lock()
        self._seen: dict[str, float] = {}

    def filter(self, record: logging.LogRecord) -> bool:
        """Tell whether the line is to be logged."""
        key = re.sub(r"(?<![\d.:])\d+(?=ms\b)|producer-\d+|consumer-\d+|#\d+", "", record.getMessage())
        now = self._clock()
        with self._lock:
            if now - self._seen.get(key, -self._interval_s) < self._interval_s:
                return False
            if len(self._seen) > 1_000:
                self._seen = {k: at for k, at in self._seen.items() if now - at < self._interval_s}
            self._seen[key] = now
            return True
