"""Schemas: the registry's topic mirrored exactly, and ids of mirrored records looked up at the destination."""

import json
import os
import struct
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from kmirror_dagster.lifecycle import MirrorState
from kmirror_dagster.settings import mirror_from_document
from kmirror_dagster.verification.schemas import Registry, check_schemas
from tests.conftest import Clusters
from tests.helpers import kafka
from tests.helpers.nodes import NodeMirror, NodeProcess, mirrored

pytestmark = pytest.mark.integration

SCHEMAS = "_schemas"


@contextmanager
def registry_on(bootstrap: str) -> Iterator[str]:
    """A registry that serves what stands in the schemas topic of a cluster; its address."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            known = {
                json.loads(record.value)["id"]: json.loads(record.value)["schema"]
                for record in kafka.consume(bootstrap, SCHEMAS)
                if record.value is not None and json.loads(record.key or b"{}")["keytype"] == "SCHEMA"
            }
            found = known.get(int(self.path.removeprefix("/schemas/ids/")))
            body = json.dumps({"schema": found} if found else {"error_code": 40403}).encode()
            self.send_response(200 if found else 404)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:
            """Nothing is printed."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def register(bootstrap: str, subject: str, number: int) -> None:
    """What a registry writes for a new schema: a marker without a value, and the schema."""
    key = {"keytype": "SCHEMA", "subject": subject, "version": 1, "magic": 1}
    value = {"subject": subject, "version": 1, "id": number, "schema": '"string"', "deleted": False}
    noop = kafka.Record(None, json.dumps({"keytype": "NOOP", "magic": 0}).encode())
    kafka.produce(
        bootstrap, SCHEMAS, [noop, kafka.Record(json.dumps(value).encode(), json.dumps(key).encode())]
    )


def test_schemas_are_mirrored_exactly_and_missing_ids_are_named(
    clusters: Clusters, node: NodeProcess
) -> None:
    """Offsets and policy of the schemas topic are kept; an id that was never registered is found in the records."""
    source, destination = clusters.source.bootstrap, clusters.destination.bootstrap
    kafka.create_topic(source, SCHEMAS, configs={"cleanup.policy": "compact"})
    register(source, "known", 41)
    mirror = NodeMirror(node, source, destination)
    topic = mirror.topic()
    kafka.create_topic(source, topic)
    coded = [struct.pack(">bI", 0, number) + b"x" for number in (41, 41, 42)]
    kafka.produce(source, topic, [kafka.Record(value, b"plain") for value in coded])

    with (
        registry_on(destination) as url,
        mirrored(node, source, destination, name=mirror.name, include=[SCHEMAS, topic]) as mirror,
    ):
        mirror.await_states(MirrorState.MIRRORING, SCHEMAS, topic)
        mirror.await_copied(SCHEMAS, topic)
        mirror.compare(SCHEMAS, topic)
        settings = mirror_from_document({**mirror.document, "schema_registry": {"url": url}}, os.environ)
        registry = Registry(settings.schema_registry)
        report = check_schemas(settings, [SCHEMAS, topic], registry)
        register(source, "late", 42)
        mirror.await_copied(SCHEMAS)
        later = check_schemas(settings, [SCHEMAS, topic], registry)
        registry.close()
    for bootstrap in (source, destination):
        kafka.delete_topic(bootstrap, SCHEMAS)

    assert (report.topics, report.resolved, report.ok) == ([topic], [41], False)
    assert [(use.schema_id, use.offset, use.part) for use in report.missing] == [(42, 2, "value")]
    assert (later.resolved, later.ok) == ([41, 42], True)
