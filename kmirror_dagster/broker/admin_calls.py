"""What every admin call shares: one client, one deadline per call, errors kept apart per item."""

import concurrent.futures
import threading
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from confluent_kafka import KafkaException

from kmirror_dagster.broker import clients
from kmirror_dagster.broker.admin_errors import admin_error
from kmirror_dagster.broker.admin_types import Answers
from kmirror_dagster.broker.client_errors import unreachable
from kmirror_dagster.broker.deadlines import Deadline
from kmirror_dagster.broker.missing_rights import Right
from kmirror_dagster.errors import AuthenticationError, ClusterUnreachableError, DeadlineError, KmirrorError
from kmirror_dagster.settings import ClusterSettings

K = TypeVar("K")
V = TypeVar("V")

# Waiting is cut into slices of this length, so that `close` from another thread ends it.
_SLICE_S = 0.2
# librdkafka answers at its own timeout; ours is a little later, so that the better message wins.
_GRACE_S = 2.0
DEFAULT_TIMEOUT_S = 30.0


class AdminCalls:
    """One librdkafka admin client with typed results; blocking, safe to share between threads.

    Args:
        settings: cluster to talk to.
        timeout_s: seconds one call may take unless it is given its own.
    """

    def __init__(self, settings: ClusterSettings, *, timeout_s: float = DEFAULT_TIMEOUT_S) -> None:
        self.settings = settings
        self._timeout_s = timeout_s
        self._closed = threading.Event()
        self._lock = threading.Lock()
        self._client: clients.ObservedAdminClient | None = None

    @property
    def client(self) -> clients.ObservedAdminClient:
        """The librdkafka client, made at the first call."""
        with self._lock:
            if self._closed.is_set():
                raise KmirrorError(f"admin client of {self.settings.address} is closed")
            if self._client is None:
                self._client = clients.admin(self.settings)
            return self._client

    def close(self) -> None:
        """End: calls that wait in other threads give up. Harmless when closed."""
        self._closed.set()
        with self._lock:
            self._client = None

    # for the calls

    def timeout(self, timeout_s: float | None) -> float:
        """Seconds a call may take; at least one, below which librdkafka refuses."""
        return max(1.0, self._timeout_s if timeout_s is None else timeout_s)

    def gather(
        self,
        futures: "Mapping[K, concurrent.futures.Future[Any]]",
        convert: Callable[[K, Any], V],
        *,
        doing: str,
        right: Right,
        timeout_s: float,
        named: Callable[[K], str] = str,
        resource: Callable[[K], str] | None = None,
    ) -> Answers[K, V]:
        """Wait for the futures of one batch and keep each item's value or error.

        Args:
            futures: one per item.
            convert: makes the value of an item from the client library's answer.
            doing: what is done to each item, for messages.
            right: right the call needs.
            timeout_s: seconds the request was given.
            named: name of an item in messages.
            resource: name of the resource an item's right is on, `named` when None.

        Raises:
            ClusterUnreachableError: when no item was answered because the cluster did not answer.
            AuthenticationError: when the cluster refused the credentials.
        """
        self._wait(list(futures.values()), doing, timeout_s)
        values: dict[K, V] = {}
        errors: dict[K, KmirrorError] = {}
        for key, future in futures.items():
            if not future.done():
                errors[key] = DeadlineError(f"{doing} {named(key)}: no answer within {timeout_s:g} s")
                continue
            error = future.exception()
            if error is None:
                values[key] = convert(key, future.result())
            elif isinstance(error, KafkaException):
                errors[key] = self.translate(
                    error, doing=f"{doing} {named(key)}", right=right, name=(resource or named)(key)
                )
            else:
                errors[key] = KmirrorError(f"{doing} {named(key)} at {self.settings.address}: {error}")
        if errors and not values:
            self._raise_when_down(errors, doing)
        return Answers(values, errors)

    def result(
        self, future: "concurrent.futures.Future[Any]", *, doing: str, right: Right, timeout_s: float
    ) -> Any:
        """Wait for a call that has one answer.

        Raises:
            KmirrorError: the translated error.
        """
        answers = self.gather(
            {"": future}, lambda _key, value: value, doing=doing, right=right, timeout_s=timeout_s
        )
        if answers.errors:
            raise answers.errors[""]
        return answers.values[""]

    def translate(self, error: Any, *, doing: str, right: Right, name: str = "") -> KmirrorError:
        """One error of librdkafka as this package's class; a refused login is named as such."""
        translated = admin_error(error, doing=doing.rstrip(), right=right, name=name, settings=self.settings)
        if isinstance(translated, (ClusterUnreachableError, DeadlineError)):
            return clients.connection_error(self._client) or translated
        return translated

    def blocking(self, call: Callable[[], V], *, doing: str, right: Right) -> V:
        """Make a call of the client library that blocks by itself.

        Raises:
            KmirrorError: the translated error.
        """
        try:
            return call()
        except KafkaException as error:
            raise self.translate(error, doing=doing, right=right) from None

    def _wait(self, futures: "list[concurrent.futures.Future[Any]]", doing: str, timeout_s: float) -> None:
        deadline = Deadline(timeout_s + _GRACE_S)
        pending: set[concurrent.futures.Future[Any]] = set(futures)
        while pending and deadline.remaining() > 0 and not self._closed.is_set():
            _, pending = concurrent.futures.wait(pending, timeout=deadline.remaining(at_most=_SLICE_S))
        if self._closed.is_set():
            raise KmirrorError(f"{doing}: admin client of {self.settings.address} is closed")

    def _raise_when_down(self, errors: Mapping[K, KmirrorError], doing: str) -> None:
        first = next(iter(errors.values()))
        if isinstance(first, AuthenticationError):
            raise first
        if all(isinstance(error, (ClusterUnreachableError, DeadlineError)) for error in errors.values()):
            raise unreachable(self.settings, str(first)) from first
