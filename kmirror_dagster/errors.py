"""Errors of this package: one root, one class per cause, flags that callers branch on."""


class KmirrorError(Exception):
    """Root of all errors raised on purpose.

    Attributes:
        retriable: trying the same thing again later may succeed without anybody's help.
        exit_code: what the command line ends with (2: the caller has to change something,
            1: it did not work).
    """

    retriable: bool = False
    exit_code: int = 1


class UsageError(KmirrorError):
    """Error when what was asked for cannot be done as asked; the message says how to put it right."""

    exit_code = 2


class SettingsError(UsageError):
    """Error when a settings document is refused; the message names path, line and remedy."""


class ClusterUnreachableError(UsageError):
    """Error when no broker of a cluster answers within the deadline."""

    retriable = True


class AuthenticationError(UsageError):
    """Error when a cluster refuses the credentials."""


class AuthorizationError(KmirrorError):
    """Error when a principal lacks a right; the message names operation, resource and principal."""

    retriable = True


class SameClusterError(UsageError):
    """Error when source and destination are one cluster (equal cluster ids)."""


class UnknownMirrorError(UsageError):
    """Error when a mirror of that name does not exist."""


class MirrorExistsError(UsageError):
    """Error when a mirror of that name exists with other settings."""


class IllegalTransitionError(UsageError):
    """Error when a state cannot follow the current one (KIP-1279, allowed transitions)."""


class NodeUnavailableError(UsageError):
    """Error when no node answers at the given endpoint."""

    retriable = True


class NodeRunningError(UsageError):
    """Error when a second node is started on the same state directory."""


class PortInUseError(UsageError):
    """Error when an address to listen on is taken."""


class ApiAuthenticationError(UsageError):
    """Error when a node refuses the API token."""


class NotLeaderError(KmirrorError):
    """Error when a node is asked for something another node leads."""

    retriable = True


class FencedError(KmirrorError):
    """Error when a newer owner exists; the old one must stop, re-read and decide again."""

    retriable = True


class StaleEpochError(FencedError):
    """Error when a state write carries an older leader epoch or state epoch than the stored one."""


class DeadlineError(KmirrorError):
    """Error when something did not finish before its deadline."""

    retriable = True


class BrokerError(KmirrorError):
    """Error answered by a broker.

    Attributes:
        code: Kafka's error code (protocol guide, "Error Codes").
        name: Kafka's name of it.
    """

    def __init__(self, code: int, name: str, message: str, *, retriable: bool = False) -> None:
        super().__init__(message)
        self.code = code
        self.name = name
        self.retriable = retriable


class ConnectionLostError(KmirrorError):
    """Error when a connection ends while answers are outstanding: their outcome is unknown."""

    retriable = True


class ReplicationError(KmirrorError):
    """Error that puts one mirror partition into FAILED; the message is the stored reason."""

    retriable = True


class ForeignWriteError(ReplicationError):
    """Error when the destination log moved without the mirror; names the offset."""

    retriable = False


class UnsupportedDataError(ReplicationError):
    """Error when the source holds something that is not mirrored exactly yet; never copied wrongly."""

    retriable = False


class SourceLossError(ReplicationError):
    """Error when the source no longer has the record at the cursor.

    Attributes:
        loss: offsets lost, the end exclusive; stored with the failure, before copying may go on without them.
    """

    retriable = False

    def __init__(self, message: str, loss: tuple[int, int] = (0, 0)) -> None:
        super().__init__(message)
        self.loss = loss


class RecordCorruptError(KmirrorError):
    """Error when a record of the state topic cannot be read; it is quarantined and reported."""


class SandboxError(KmirrorError):
    """Error when a sandbox cluster cannot be started, stopped or found."""
