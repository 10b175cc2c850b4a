"""What `dg scaffold defs kmirror_dagster.KafkaMirrorComponent NAME` writes."""

import json

import dagster as dg
from pydantic import BaseModel, Field

from kmirror_dagster.errors import UsageError
from kmirror_dagster.orchestration.keys import dagster_name
from kmirror_dagster.settings.filters import split_list

DEFS_FILE, NODE_FILE = "defs.yaml", "node.yaml"

_DEFS = """\
type: {type_name}

attributes:
  # begins the names of the jobs; one for each component of this project
  prefix: {prefix}
  mirrors:
    - settings:
        mirror: {mirror}
        source:
          bootstrap.servers: {source}
          # secrets stay in the nodes' environment:
          # security.protocol: SASL_SSL
          # sasl.mechanism: SCRAM-SHA-512
          # sasl.username: kmirror
          # sasl.password: ${{SOURCE_PASSWORD}}
        destination:
          bootstrap.servers: {destination}
        filters:
          # whole-name RE2 patterns; a plain name is one too
          topics.include: {topics}
        policies:
          rpo_seconds: 60
  node:
    # local: a node is started on this machine when none runs.
    # In production nodes have their own supervisor: mode: attach, endpoint: https://..., token_variable: ...
    mode: local
    node_config: {node_file}
  # translation:
  #   owners: [team:streaming]
"""

_NODE = """\
# Settings of the node that does the copying; it keeps its states on the destination cluster.
destination:
  bootstrap.servers: {destination}
"""


class ScaffoldParams(BaseModel):
    """Options of `dg scaffold defs` for this component."""

    mirror: str = Field(default="", description="Name of the mirror; the folder's name when left out.")
    source: str = Field(default="localhost:9092", description="Brokers to copy from, host:port.")
    destination: str = Field(default="localhost:9093", description="Brokers to copy to, host:port.")
    topics: str = Field(default="orders.*", description="Topics to mirror: RE2 patterns with commas between.")


class KafkaMirrorScaffolder(dg.Scaffolder[ScaffoldParams]):
    """Writes `defs.yaml` with one mirror in it and `node.yaml` for the node beside it."""

    @classmethod
    def get_scaffold_params(cls) -> type[ScaffoldParams]:
        """Options that are taken from the command line."""
        return ScaffoldParams

    def scaffold(self, request: dg.ScaffoldRequest[ScaffoldParams]) -> None:
        """Write the files.

        Raises:
            UsageError: when asked for Python, or to append to a file.
        """
        if request.scaffold_format != "yaml" or request.append:
            raise UsageError(
                "this component is scaffolded as a defs.yaml of its own; in Python call build_mirror_definitions()"
            )
        params, folder = request.params, request.target_path
        name = folder.name
        (folder / DEFS_FILE).write_text(
            _DEFS.format(
                type_name=request.type_name,
                prefix=dagster_name(name),
                mirror=params.mirror or name,
                source=params.source,
                destination=params.destination,
                topics=json.dumps(split_list(params.topics)),
                node_file=NODE_FILE,
            ),
            encoding="utf-8",
        )
        (folder / NODE_FILE).write_text(_NODE.format(destination=params.destination), encoding="utf-8")
