"""Example code location: the mirror of the sandbox, seen and steered in Dagster.

It loads whether or not the sandbox runs. Look at it with `make demo`, or by hand:

    kmirror sandbox start
    dagster dev -f definitions.py
"""

import os

from dagster import in_process_executor

from kmirror_dagster.coordination.state_directory import STATE_DIR_VARIABLE
from kmirror_dagster.orchestration import KMirrorResource, build_mirror_definitions
from kmirror_dagster.sandbox.pair import MIRROR, MIRROR_FILE, NODE_FILE, default_home

home = default_home()
document = home / MIRROR_FILE

defs = build_mirror_definitions(
    # before the sandbox's first start there is no document; its mirror has a fixed name
    mirrors=[document if document.exists() else MIRROR],
    resource=KMirrorResource(
        mode="local",
        node_config=str(home / NODE_FILE),
        state_dir=os.environ.get(STATE_DIR_VARIABLE, ""),
    ),
    executor=in_process_executor,
)
