"""Code location of the containers: every mirror whose settings lie in /etc/kmirror/mirrors, on the nodes' API.

Where the nodes are and their token come from KMIRROR_ENDPOINT and KMIRROR_TOKEN_FILE.
"""

import os
from pathlib import Path

from dagster import in_process_executor

from kmirror_dagster.orchestration import KMirrorResource, build_mirror_definitions

documents = Path(os.environ.get("KMIRROR_MIRRORS", "/etc/kmirror/mirrors"))

defs = build_mirror_definitions(
    mirrors=sorted(documents.glob("*.yaml")),
    resource=KMirrorResource(),
    executor=in_process_executor,
)
