"""The component: what stands in `defs.yaml`, what of it is refused and where, what it scaffolds."""

import json
import re
import traceback
from pathlib import Path
from typing import Any

import dagster as dg
import pytest
import yaml
from dagster.components.component_scaffolding import scaffold_object
from dagster.components.testing import create_defs_folder_sandbox
from jsonschema import Draft202012Validator

import kmirror_dagster
from kmirror_dagster.orchestration import KafkaMirrorComponent, KMirrorTranslator, MirrorProps

# Dagster's own use of what it calls beta or what pydantic calls deprecated
pytestmark = [
    pytest.mark.filterwarnings("ignore:.* is currently in beta"),
    pytest.mark.filterwarnings("ignore:`parse_obj_as` is deprecated"),
]

TYPE = "kmirror_dagster.KafkaMirrorComponent"

YAML = """\
type: kmirror_dagster.KafkaMirrorComponent
attributes:
  prefix: here
  mirrors:
    - settings:
        mirror: orders
        source:
          bootstrap.servers: "${SOURCE}"
        destination:
          bootstrap.servers: localhost:9093
        policies:
          rpo_seconds: 7
"""


def load(text: str = YAML, **files: str) -> dg.Definitions:
    """Load a project with one `defs.yaml` and files beside it, as a code location does."""
    with create_defs_folder_sandbox() as sandbox:
        folder = sandbox.defs_folder_path / "mirrors"
        folder.mkdir()
        (folder / "defs.yaml").write_text(text)
        for name, content in files.items():
            (folder / f"{name}.yaml").write_text(content)
        with sandbox.build_all_defs() as defs:
            dg.Definitions.validate_loadable(defs)
            return defs


def refusal(text: str, **files: str) -> str:
    """Why it does not load: the errors that Dagster prints below each other."""
    with pytest.raises(Exception) as caught:
        load(text, **files)
    return "".join(traceback.format_exception(caught.value))


def errors(text: str) -> list[tuple[str, str]]:
    """What `dg check yaml` finds: path and message."""
    schema = KafkaMirrorComponent.attributes_schema()
    found = Draft202012Validator(schema).iter_errors(yaml.safe_load(text)["attributes"])
    return [(".".join(str(part) for part in error.path), error.message) for error in found]


def test_component_gives_what_the_builder_gives() -> None:
    """A mirror in defs.yaml has the asset, jobs, sensors and limits that the builder gives."""
    defs = load()
    repository = defs.get_repository_def()
    assert repository.has_job("here_stop")
    assert {sensor.name for sensor in repository.sensor_defs} >= {"here_node_keeper", "orders_refresh"}
    assert dg.AssetKey(["kafka_mirror", "orders"]) in defs.resolve_asset_graph().get_all_asset_keys()
    assert set(repository.get_top_level_resources()) == {"here"}


def test_several_mirrors_and_clusters() -> None:
    """One component shows several mirrors, by settings, file and name; two of other prefixes live side by side."""
    payments = "mirror: payments\nsource: {bootstrap.servers: a:1}\ndestination: {bootstrap.servers: b:1}\n"
    text = YAML + "    - document: payments.yaml\n    - name: users\n"
    text += "---\n" + YAML.replace("here", "there").replace("orders", "o2")
    graph = load(text, payments=payments).resolve_asset_graph()
    mirrors = {key.path[1] for key in graph.get_all_asset_keys() if key.path[0] == "kafka_mirror"}
    assert mirrors == {"orders", "payments", "users", "o2"}


def test_translation_changes_the_asset() -> None:
    """Key, group, owners and tags are changed in YAML; the mirror's name can be written into them."""
    text = YAML + (
        "  translation:\n    key: dr/{{ mirror }}\n    group_name: dr\n    owners: [team:dr]\n"
        "    tags: {tier: '{{ dagster_name }}'}\n"
    )
    node = load(text).resolve_asset_graph().get(dg.AssetKey(["dr", "orders"]))
    assert (node.group_name, list(node.owners), node.tags["tier"]) == ("dr", ["team:dr"], "orders")
    assert isinstance(node.partitions_def, dg.DynamicPartitionsDefinition)


class _Teams(KMirrorTranslator):
    def get_owners(self, props: MirrorProps) -> list[str]:
        return [f"team:{props.target.name}"]


class TeamsComponent(KafkaMirrorComponent):
    """A subclass with a translator in Python."""

    def translator(self) -> KMirrorTranslator:
        return _Teams()


def test_translator_of_a_subclass() -> None:
    """What YAML does not reach is done by a subclass with a translator of its own."""
    text = YAML.replace(TYPE, f"{__name__}.TeamsComponent")
    node = load(text).resolve_asset_graph().get(dg.AssetKey(["kafka_mirror", "orders"]))
    assert list(node.owners) == ["team:orders"]


@pytest.mark.parametrize(
    ("written", "instead", "where", "what"),
    [
        (
            "bootstrap.servers: localhost",
            "bootstrap.server: localhost",
            "mirrors.0.settings.destination",
            "'bootstrap.server' was unexpected",
        ),
        ("rpo_seconds: 7", "rpo_seconds: soon", "mirrors.0.settings.policies.rpo_seconds", "'soon'"),
        ("rpo_seconds: 7", "rpo_seconds: -1", "mirrors.0.settings.policies.rpo_seconds", "minimum of 0"),
        ("- settings:", "- setings:", "mirrors.0", "'setings' was unexpected"),
        ("prefix: here", "prefixx: here", "", "'prefixx' was unexpected"),
        ("prefix: here", "heartbeat_seconds: often", "heartbeat_seconds", "'often'"),
        ("prefix: here", "node: {mode: locl}", "node.mode", "'locl'"),
        ("mirror: orders", "name: orders", "mirrors.0.settings", "'name' was unexpected"),
    ],
)
def test_check_yaml_names_the_setting(written: str, instead: str, where: str, what: str) -> None:
    """What is wrong is found by the schema alone, at the setting itself, which `dg check yaml` shows by line."""
    found = errors(YAML.replace(written, instead, 1))
    assert any(path == where and what in message for path, message in found), found


@pytest.mark.parametrize("reference", ["${RPO}", "{{ env.RPO }}"])
def test_references_are_allowed_everywhere(reference: str) -> None:
    """A reference may stand for a number, a list or a word of a choice."""
    text = YAML.replace("rpo_seconds: 7", f'rpo_seconds: "{reference}"')
    text = text.replace(
        "bootstrap.servers: localhost:9093",
        f'bootstrap.servers: "{reference}"\n          security.protocol: "{reference}"',
    )
    assert errors(text) == []


def test_schema_describes_every_field() -> None:
    """Each attribute has a description: they are the component's page in Dagster."""

    def missing(schema: dict[str, Any], path: str = "") -> list[str]:
        found = []
        for name, each in schema.get("properties", {}).items():
            here = f"{path}.{name}"
            found += [] if each.get("description") else [here]
            found += missing(each, here) + missing(each.get("items", {}), here)
        return found

    schema = KafkaMirrorComponent.attributes_schema()
    ours = [name for name in missing(schema) if not name.startswith(".translation.")]
    assert ours == []


@pytest.mark.parametrize(
    ("written", "instead", "error"),
    [
        ("rpo_seconds: 7", "start: yesterday", r"defs\.yaml:12: policies\.start: expected earliest"),
        (
            "bootstrap.servers: localhost:9093",
            "{bootstrap.servers: 'b:1', security.protocol: SASL_SSL, sasl.mechanism: PLAIN,"
            " sasl.username: u, sasl.password: s3cret}",
            r"defs\.yaml:10: destination\.sasl\.password: a secret must not be stored",
        ),
    ],
)
def test_loading_names_file_and_line(written: str, instead: str, error: str) -> None:
    """What a schema cannot judge is refused while definitions load (`dg check defs`), by file and line."""
    text = refusal(YAML.replace(written, instead))
    assert re.search(error, text)
    assert "s3cret" not in text


def test_references_in_policies_are_resolved(monkeypatch: pytest.MonkeyPatch) -> None:
    """A limit may come from the environment of the code location; where it is missing, that is said by line."""
    text = YAML.replace("rpo_seconds: 7", 'rpo_seconds: "${RPO}"')
    assert "defs.yaml:12: policies.rpo_seconds: " in refusal(text)
    monkeypatch.setenv("RPO", "11")
    load(text)


@pytest.mark.parametrize("item", ["{}", "{name: a, document: b.yaml}"])
def test_a_mirror_is_given_once(item: str) -> None:
    """A mirror is given by exactly one of settings, file and name."""
    text = f"type: {TYPE}\nattributes:\n  mirrors: [{item}]\n"
    assert "exactly one of settings, document and name" in refusal(text)


def test_token_is_taken_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """The token is named by its variable; neither its value nor a literal is in the definitions (E4)."""
    monkeypatch.setenv("MY_TOKEN", "s3cret-token")
    text = YAML + "  node: {endpoint: 'http://node:1', token_variable: MY_TOKEN}\n"
    defs = load(text)
    resource = defs.get_repository_def().get_top_level_resources()["here"]
    assert "s3cret" not in json.dumps(resource.config_schema.default_value)
    assert "MY_TOKEN" in json.dumps(resource.config_schema.default_value)
    assert errors(YAML + "  node: {token: s3cret}\n")[0][1].startswith("Additional properties")


def test_scaffolded_files_are_valid(tmp_path: Path) -> None:
    """What is scaffolded passes the checks as it is, with what was asked for in it."""
    folder = tmp_path / "orders-eu"
    params = {"source": "a:1", "destination": "b:2", "topics": "orders.*,pay{1,2}"}
    scaffold_object(folder, TYPE, json.dumps(params), "yaml", None)
    text = (folder / "defs.yaml").read_text()
    assert errors(text) == []
    assert 'topics.include: ["orders.*", "pay{1,2}"]' in text
    assert "prefix: orders_eu" in text
    assert "bootstrap.servers: b:2" in (folder / "node.yaml").read_text()
    load(text, node=(folder / "node.yaml").read_text())


def test_top_level_names() -> None:
    """What users need is in the package itself, loaded when asked for."""
    assert kmirror_dagster.KafkaMirrorComponent is KafkaMirrorComponent
    assert set(kmirror_dagster._FROM_ORCHESTRATION) <= set(dir(kmirror_dagster))
    with pytest.raises(AttributeError):
        _ = kmirror_dagster.nothing


def test_settings_error_of_a_file_names_its_line() -> None:
    """A file with settings is checked while definitions load, by its own name and line."""
    text = f"type: {TYPE}\nattributes:\n  mirrors: [{{document: o.yaml}}]\n"
    assert "o.yaml:2: sorce: unknown setting; did you mean 'source'" in refusal(
        text, o="mirror: o\nsorce: {}\n"
    )
