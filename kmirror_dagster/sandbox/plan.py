"""The plan of a sandbox cluster: who listens where; written once and found by later processes."""

import base64
import secrets
from pathlib import Path

from pydantic import BaseModel, ConfigDict

from kmirror_dagster.errors import SandboxError
from kmirror_dagster.sandbox.ports import PortClaim
from kmirror_dagster.sandbox.properties import CONTROLLER, BrokerPlan

PLAN_NAME = "cluster.json"


class ClusterPlan(BaseModel):
    """What does not change over the life of a cluster's data.

    Attributes:
        name: name of the cluster.
        cluster_id: Kafka's cluster id.
        ports: one entry per broker, in the order of node ids: TCP port by listener name.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str
    cluster_id: str
    ports: tuple[dict[str, int], ...]

    @classmethod
    def load(cls, home: Path) -> "ClusterPlan | None":
        """Read the plan of the cluster in a directory; None when there is none.

        Raises:
            SandboxError: the file is damaged.
        """
        path = home / PLAN_NAME
        try:
            return cls.model_validate_json(path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            return None
        except ValueError as error:
            raise SandboxError(f"{path} is damaged; run: kmirror sandbox reset") from error

    def save(self, home: Path) -> None:
        """Write the plan in one step."""
        temporary = home / f"{PLAN_NAME}.new"
        temporary.write_text(self.model_dump_json(indent=1), encoding="utf-8")
        temporary.replace(home / PLAN_NAME)

    def brokers(self, home: Path) -> tuple[BrokerPlan, ...]:
        """Plans of the single brokers."""
        return tuple(
            BrokerPlan(node_id=number, ports=ports, home=home / f"broker-{number}")
            for number, ports in enumerate(self.ports, start=1)
        )


def random_uuid() -> str:
    """A random id as Kafka writes them: 16 bytes in URL-safe base64.

    It never begins with ``-``, which Kafka's tools would take for an option.
    """
    data = bytes([secrets.randbelow(128)]) + secrets.token_bytes(15)
    return base64.urlsafe_b64encode(data).decode("ascii").rstrip("=")


def choose_ports(claim: PortClaim, brokers: int, listeners: tuple[str, ...]) -> tuple[dict[str, int], ...]:
    """Free ports for every listener of every broker, and for its controller."""
    return tuple({name: claim.take() for name in (*listeners, CONTROLLER)} for _ in range(brokers))
