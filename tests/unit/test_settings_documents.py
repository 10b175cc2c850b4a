"""Settings documents: what is read, and the one line that says why something is not."""

import json
import traceback
from pathlib import Path

import pytest

from kmirror_dagster.errors import SettingsError
from kmirror_dagster.settings import (
    MirrorSettings,
    load_document,
    load_mirror,
    load_node,
    mirror_from_document,
    node_from_document,
    parse_mirror,
    refuse_literal_secrets,
)

SECRET = "hunter2-not-to-be-seen"

ORDERS = """\
mirror: orders
source:
  bootstrap.servers: kafka-a:9092,kafka-b:9092
  security.protocol: SASL_SSL
  sasl.mechanism: SCRAM-SHA-512
  sasl.username: kmirror
  sasl.password: ${SOURCE_PASSWORD}
destination:
  bootstrap.servers: ["[::1]:9092", "localhost:9093"]
filters:
  topics.include: [orders, "payments.*"]
policies:
  start: latest
  failover:
    cool_down_seconds: 30
"""


def refusal(text: str, environ: dict[str, str] | None = None) -> str:
    """The message with which YAML text is refused; always one line."""
    with pytest.raises(SettingsError) as caught:
        parse_mirror(text, "orders.yaml", {"SOURCE_PASSWORD": SECRET} if environ is None else environ)
    message = str(caught.value)
    assert "\n" not in message
    assert SECRET not in "".join(traceback.format_exception(caught.value))
    return message


def replaced(old: str, new: str) -> str:
    """The example with one part of it changed."""
    assert old in ORDERS
    return ORDERS.replace(old, new)


def test_a_document_becomes_settings() -> None:
    """Every part of a document arrives in its place, with references resolved."""
    settings = parse_mirror(ORDERS, "orders.yaml", {"SOURCE_PASSWORD": SECRET})
    assert settings.mirror == "orders"
    assert settings.source.bootstrap() == [("kafka-a", 9092), ("kafka-b", 9092)]
    assert settings.source.sasl_password is not None
    assert settings.source.sasl_password.get_secret_value() == SECRET
    assert settings.destination.bootstrap() == [("::1", 9092), ("localhost", 9093)]
    assert settings.filters.topics_include == ("orders", "payments.*")
    assert settings.policies.start.at == "latest"
    assert settings.policies.failover.cool_down_seconds == 30


def test_files_are_read_with_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`load_mirror` takes references from the process's environment unless it is given another one."""
    path = tmp_path / "orders.yaml"
    path.write_text(ORDERS, encoding="utf-8")
    monkeypatch.setenv("SOURCE_PASSWORD", SECRET)
    assert load_mirror(path) == parse_mirror(ORDERS, "orders.yaml", {"SOURCE_PASSWORD": SECRET})
    with pytest.raises(SettingsError, match=r"orders\.yaml:7: .* SOURCE_PASSWORD is not set"):
        load_mirror(path, {})


def test_a_misspelt_setting_is_named_with_the_nearest_one() -> None:
    """A misspelt setting is refused with file, line, path and the name that was probably meant."""
    assert refusal(replaced("destination:\n  bootstrap.servers", "destination:\n  bootstrap.server")) == (
        "orders.yaml:9: destination.bootstrap.server: unknown setting; did you mean 'bootstrap.servers'? "
        "(1 more problem in this document)"
    )


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        (
            "start: latest",
            "start: yesterday",
            "13: policies.start: expected earliest, latest or {timestamp: ...}, got 'yesterday'",
        ),
        (
            "start: latest",
            "start: {timestamp: soon}",
            "13: policies.start.timestamp: expected a time such as 2026-01-31T00:00:00Z, got 'soon'",
        ),
        (
            "start: latest",
            "start: {timestamp: 1700000000}",
            "13: policies.start.timestamp: expected a time such as 2026-01-31T00:00:00Z, got 1700000000",
        ),
        (
            "start: latest",
            "start: {timestamp: 2026-01-31T00:00:00}",
            "13: policies.start.timestamp: needs its offset from UTC: append Z, or +01:00 and the like",
        ),
        (
            "cool_down_seconds: 30",
            "cool_down_seconds: soon",
            "15: policies.failover.cool_down_seconds: expected a whole number, got 'soon'",
        ),
        (
            "cool_down_seconds: 30",
            "cool_down_seconds: 1.5",
            "15: policies.failover.cool_down_seconds: expected a whole number, got 1.5",
        ),
        (
            "cool_down_seconds: 30",
            "cool_down_seconds: -1",
            "15: policies.failover.cool_down_seconds: expected at least 0, got -1",
        ),
        (
            "cool_down_seconds: 30",
            "bad_observations: 0",
            "15: policies.failover.bad_observations: expected at least 1, got 0",
        ),
        (
            "security.protocol: SASL_SSL",
            "security.protocol: TLS",
            "4: source.security.protocol: expected PLAINTEXT, SSL, SASL_PLAINTEXT or SASL_SSL, got 'TLS'",
        ),
        (
            "sasl.username: kmirror",
            "sasl.username: 12",
            "6: source.sasl.username: expected text, got 12; put it in quotes",
        ),
        (
            "sasl.username: kmirror",
            "sasl.username: true",
            "6: source.sasl.username: expected text, got true; put it in quotes",
        ),
        (
            "kafka-b:9092",
            "kafka-b",
            "3: source.bootstrap.servers: expected host:port (an IPv6 address in brackets: [::1]:9092), "
            "got 'kafka-a:9092,kafka-b'",
        ),
        (
            '"payments.*"',
            '"pay("',
            "11: filters.topics.include: 'pay(' is not a valid RE2 pattern: missing )",
        ),
        ("topics.include: [", "topics.include: [{a: b}, ", "11: filters.topics.include[0]: expected text"),
        (
            "mirror: orders",
            "mirror: a/b",
            "1: mirror: expected 1 to 249 letters, digits, '.', '_' or '-', got 'a/b'",
        ),
        ("mirror: orders", "mirror:", "1: mirror: expected text, got nothing"),
        (
            "filters:\n",
            "filters: all\n# ",
            "10: filters: expected a section of settings, each as name: value, got 'all'",
        ),
    ],
)
def test_a_wrong_value_is_named_with_what_was_expected(old: str, new: str, message: str) -> None:
    """A value of a wrong kind is refused with file, line, path, what was expected, and what is there."""
    text = replaced(old, new)
    if new.endswith("# "):
        text = text.replace("  topics.include", "#")
    assert refusal(text) == f"orders.yaml:{message}"


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        (
            "  sasl.username: kmirror\n",
            "",
            "2: source.sasl.username: is required with sasl.mechanism SCRAM-SHA-512",
        ),
        (
            "  sasl.mechanism: SCRAM-SHA-512\n",
            "",
            "2: source.sasl.mechanism: is required with security.protocol SASL_SSL: "
            "PLAIN, SCRAM-SHA-256, SCRAM-SHA-512 or OAUTHBEARER",
        ),
        (
            "security.protocol: SASL_SSL",
            "security.protocol: SSL",
            "5: source.sasl.mechanism: has no effect with security.protocol SSL: "
            "set that to SASL_SSL or SASL_PLAINTEXT, or remove this",
        ),
        ("mirror: orders\n", "", " mirror: required setting is missing"),
        (
            "destination:\n  bootstrap.servers",
            "destination:\n  #",
            "8: destination: expected a section of settings, each as name: value, got nothing",
        ),
    ],
)
def test_settings_that_need_each_other_are_named(old: str, new: str, message: str) -> None:
    """A setting that another one requires, or makes useless, is named with that other one."""
    assert refusal(replaced(old, new)) == f"orders.yaml:{message}"


@pytest.mark.parametrize(
    ("line", "advice"),
    [
        ("topics.include: [a]", "it belongs under 'filters'"),
        ("start: latest", "it belongs under 'policies'"),
        ("bad_observations: 3", "it belongs under 'policies.failover'"),
        ("sasl.mechanisms: PLAIN", "did you mean 'sasl.mechanism'?"),
        ("sasl.jaas.config: x", "use sasl.username and sasl.password"),
        (
            "enable.ssl.certificate.verification: false",
            "TLS is always verified: name the authority in ssl.ca.location",
        ),
        ("SASL.USERNAMES: x", "did you mean 'sasl.username'?"),
        ("weather: fine", "remove it (names here are Kafka's client properties)"),
    ],
)
def test_unknown_settings_come_with_advice(line: str, advice: str) -> None:
    """A setting in the wrong place, of another client, or of nobody is refused with what to do about it."""
    message = refusal(replaced("  sasl.username: kmirror\n", f"  sasl.username: kmirror\n  {line}\n"))
    assert message == f"orders.yaml:7: source.{line.split(':')[0]}: unknown setting; {advice}"


def test_an_unknown_setting_elsewhere_lists_the_known_ones() -> None:
    """Where nothing is near and the section is small, its settings are listed."""
    assert refusal(ORDERS + "zzz: 1\n") == (
        "orders.yaml:16: zzz: unknown setting; known here: mirror, source, destination, filters, policies, "
        "schema_registry"
    )
    assert refusal(ORDERS + "sasl.username: x\n").endswith("it belongs under 'source' or 'destination'")


def test_a_setting_given_twice_is_refused() -> None:
    """YAML would let the last one win; here both lines are named, in either spelling."""
    twice = replaced("  sasl.username: kmirror\n", "  sasl.username: kmirror\n  sasl.username: other\n")
    assert refusal(twice) == (
        "orders.yaml:7: source.sasl.username: given twice (first on line 6); remove one"
    )
    assert refusal(twice.replace("  sasl.username: other", "  sasl_username: other")) == (
        "orders.yaml:7: source.sasl_username: given twice, also as sasl.username; remove one"
    )


def test_names_with_underscores_are_settings_too() -> None:
    """A dotted name may be written with underscores, and errors keep the spelling of the document."""
    text = ORDERS.replace("bootstrap.servers", "bootstrap_servers").replace(
        "topics.include", "topics_include"
    )
    assert parse_mirror(text, "x", {"SOURCE_PASSWORD": "p"}) == parse_mirror(
        ORDERS, "x", {"SOURCE_PASSWORD": "p"}
    )
    assert refusal(text.replace("kafka-b:9092", "kafka-b")).startswith(
        "orders.yaml:3: source.bootstrap_servers: expected host:port"
    )


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("mirror: orders\nsource: [", "2: not valid YAML: "),
        ("mirror: orders\n\tsource: x\n", "2: not valid YAML: "),
        (
            "mirror: orders\nsource: *base\n",
            "2: not valid YAML: a value that begins with * has to be put in quotes",
        ),
        (
            "mirror: a\n---\nmirror: b\n",
            "2: not valid YAML: more than one document in the file; write one file for each",
        ),
        ("mirror: a\x00b\n", "1: not valid YAML: a character that is not allowed"),
        ("- mirror\n", "1: expected settings, each as name: value"),
        ("", " is empty; write the settings there"),
        ("# nothing\n", " is empty; write the settings there"),
        ("mirror: orders\n3: x\n", "2: expected a setting's name before the colon"),
        ("mirror: orders\n? [a]\n: x\n", "2: expected a setting's name before the colon"),
        ("mirror: !!python/name:os.system x\n", "1: mirror: a tag (!...) has no use here"),
        ("mirror: !secret x\n", "1: mirror: a tag (!...) has no use here"),
        ("mirror: !!int x\n", "1: mirror: not what its tag !!int says; remove the tag"),
        ("mirror: &a [*a]\n", "1: mirror[0]: an alias refers to what it is part of"),
        ("a: &a\n  <<: *a\n", "1: a: an alias refers to what it is part of"),
        ("a: {<<: 3}\n", "1: a.<<: expected an alias of a section, such as *base"),
        ("mirror: " + "[" * 5_000, " not valid"),
    ],
)
def test_what_is_no_yaml_document_is_one_line(text: str, message: str) -> None:
    """Syntax errors and unusable YAML are one line with its number, never YAML's own text."""
    assert refusal(text).startswith(f"orders.yaml:{message}")


def test_aliases_that_explode_are_refused() -> None:
    """A few lines that stand for billions of values end at once."""
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x, x]"]
    lines += [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 10)}]" for n in range(1, 12)]
    assert "more than 50000 values" in refusal("\n".join(lines))


def test_both_clusters_may_share_settings_by_an_anchor() -> None:
    """A merge key brings settings along; what is written at the place itself wins."""
    text = """\
mirror: orders
source: &base
  bootstrap.servers: a:1
  client.id: shared
  request.timeout.ms: 5000
destination:
  <<: *base
  bootstrap.servers: b:1
"""
    settings = parse_mirror(text, "orders.yaml", {})
    assert settings.destination.bootstrap() == [("b", 1)]
    assert settings.destination.client_id == "shared"
    assert refusal(text.replace("5000", "fast")) == (
        "orders.yaml:5: source.request.timeout.ms: expected a whole number, got 'fast' "
        "(1 more problem in this document)"
    )


def test_scalars_mean_what_they_look_like(tmp_path: Path) -> None:
    """`on`, `no` and times are text, so that a document is JSON and survives storing."""
    path = tmp_path / "orders.yaml"
    text = replaced("sasl.username: kmirror", "sasl.username: no").replace(
        "start: latest", "start: {timestamp: 2026-01-31T00:00:00Z}"
    )
    path.write_text(text.replace("[orders,", "[on, 1:30,"), encoding="utf-8")
    document = load_document(path)
    assert document["source"]["sasl.username"] == "no"
    assert document["filters"]["topics.include"] == ["on", "1:30", "payments.*"]
    assert document["policies"]["start"] == {"timestamp": "2026-01-31T00:00:00Z"}
    assert json.loads(json.dumps(document)) == document


def test_an_empty_section_is_its_defaults() -> None:
    """A section whose settings are all commented out is as if it were not there."""
    text = ORDERS[: ORDERS.index("filters:")] + "filters:\npolicies:\n"
    settings = parse_mirror(text, "orders.yaml", {"SOURCE_PASSWORD": "p"})
    assert settings.filters.topics_include == ()
    assert settings.policies.start.at == "earliest"


@pytest.mark.parametrize("load", [load_mirror, load_document, load_node])
def test_files_that_cannot_be_read_are_one_line(load, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    """A missing file, a directory, and bytes that are no text are each one line that names the path."""
    missing = tmp_path / "nothing.yaml"
    with pytest.raises(SettingsError, match=rf"^{missing}: no such file; check the path"):
        load(missing)
    with pytest.raises(SettingsError, match=f"^{tmp_path}: cannot be read: Is a directory$"):
        load(tmp_path)
    binary = tmp_path / "binary.yaml"
    binary.write_bytes(b"mirror: \xff\xfe")
    with pytest.raises(SettingsError, match=f"^{binary}: not UTF-8 text"):
        load(binary)
    large = tmp_path / "large.yaml"
    large.write_bytes(b"#" * 1_000_001)
    with pytest.raises(SettingsError, match=f"^{large}: larger than 1000000 bytes"):
        load(large)


def test_a_document_is_checked_as_far_as_it_can_be_without_the_environment(tmp_path: Path) -> None:
    """What is sent to a node keeps its references; names and types are judged before that."""
    path = tmp_path / "orders.yaml"
    path.write_text(
        replaced("security.protocol: SASL_SSL", "security.protocol: ${PROTOCOL}")
        .replace("kafka-a:9092,kafka-b:9092", "${HOST}:9092")
        .replace("cool_down_seconds: 30", "cool_down_seconds: ${COOL_DOWN}"),
        encoding="utf-8",
    )
    document = load_document(path)
    assert document["source"]["sasl.password"] == "${SOURCE_PASSWORD}"
    assert document["source"]["bootstrap.servers"] == "${HOST}:9092"
    environ = {"PROTOCOL": "SASL_SSL", "HOST": "h", "SOURCE_PASSWORD": "p", "COOL_DOWN": "45"}
    settings = mirror_from_document(document, environ)
    assert settings.source.bootstrap() == [("h", 9092)]
    assert settings.policies.failover.cool_down_seconds == 45
    path.write_text(replaced("latest", "later"), encoding="utf-8")
    with pytest.raises(SettingsError, match=r"orders\.yaml:13: policies\.start: expected earliest"):
        load_document(path)
    path.write_text(replaced("  sasl.username: kmirror\n", ""), encoding="utf-8")
    with pytest.raises(SettingsError, match=r"sasl\.username: is required"):
        load_document(path)


def test_a_value_from_the_environment_is_not_quoted_back() -> None:
    """A wrong value that came from a variable is shown as the reference: it may be a secret."""
    text = replaced("cool_down_seconds: 30", "cool_down_seconds: ${SOURCE_PASSWORD}")
    assert refusal(text) == (
        "orders.yaml:15: policies.failover.cool_down_seconds: expected a whole number, "
        "got '${SOURCE_PASSWORD}'"
    )


def test_a_document_from_the_api_is_refused_by_the_name_of_its_mirror() -> None:
    """Without a file, messages begin with the mirror, and name variable and setting."""
    document = {
        "mirror": "orders",
        "source": {
            "bootstrap.servers": "a:1",
            "security.protocol": "SASL_PLAINTEXT",
            "sasl.mechanism": "PLAIN",
            "sasl.username": "u",
            "sasl.password": "${ORDERS_PASSWORD}",
        },
        "destination": {"bootstrap.servers": "b:1"},
    }
    with pytest.raises(SettingsError) as caught:
        mirror_from_document(document, {})
    assert str(caught.value) == (
        "mirror 'orders': source.sasl.password: environment variable ORDERS_PASSWORD is not set; "
        "set it where this process starts, or write $${ORDERS_PASSWORD} for the literal text"
    )
    with pytest.raises(SettingsError, match=r"^request body: source: required setting is missing"):
        mirror_from_document({"mirror": "orders"}, {}, name="request body")


@pytest.mark.parametrize("spelling", ["sasl.password", "sasl_password"])
@pytest.mark.parametrize("literal", [SECRET, "${A}" + SECRET, "$${A}", "${A"])
def test_literal_secrets_are_not_stored(spelling: str, literal: str) -> None:
    """A document with a secret in plain text is refused before it is stored; the text is not repeated."""
    with pytest.raises(SettingsError) as caught:
        refuse_literal_secrets({"mirror": "orders", "source": {spelling: literal}})
    assert str(caught.value) == (
        f"mirror 'orders': source.{spelling}: a secret must not be stored: write ${{SOURCE_SASL_PASSWORD}} "
        "and set that environment variable"
    )
    refuse_literal_secrets({"mirror": "orders", "source": {spelling: "${A}"}})
    refuse_literal_secrets({"mirror": "orders", "source": {spelling: "${A}${B}"}})


def test_a_file_with_a_literal_secret_is_refused_with_its_line(tmp_path: Path) -> None:
    """`load_document` refuses a literal secret where it stands; `load_mirror` stores nothing."""
    path = tmp_path / "orders.yaml"
    path.write_text(replaced("${SOURCE_PASSWORD}", SECRET), encoding="utf-8")
    with pytest.raises(
        SettingsError, match=r"orders\.yaml:7: source\.sasl\.password: a secret must not be stored"
    ):
        load_document(path)
    assert load_mirror(path, {}).source.sasl_password is not None


def test_secrets_are_never_shown() -> None:
    """No text form of settings, and no error about them, contains a secret."""
    settings = parse_mirror(ORDERS, "orders.yaml", {"SOURCE_PASSWORD": SECRET})
    forms = [
        repr(settings),
        str(settings),
        repr(settings.source),
        f"{settings.source.sasl_password}",
        settings.model_dump_json(),
        settings.model_dump_json(by_alias=True),
        repr(settings.model_dump()),
        json.dumps(settings.model_dump(mode="json")),
    ]
    assert not [form for form in forms if SECRET in form]
    assert settings.source.as_librdkafka()["sasl.password"] == SECRET


@pytest.mark.parametrize(
    "text",
    [
        f"mirror: orders\nsource:\n  sasl.password: *{SECRET}\n",
        f"mirror: orders\nsource:\n  sasl.password: &{SECRET}\n  &b c\n",
        f"mirror: orders\nsource:\n  sasl.password: !{SECRET} x\n",
        f"mirror: orders\nsource:\n  sasl.password: !a!{SECRET} x\n",
        f"mirror: orders\nsource:\n  sasl.password: '{SECRET}\n",
        f"mirror: orders\nsource:\n  sasl.password: [{SECRET}\n",
        f"mirror: orders\nsource:\n  sasl.password: [{SECRET}]\n",
        f"mirror: orders\nsource:\n  sasl.password: {{a: {SECRET}}}\n",
        f"mirror: orders\nsource:\n  sasl.password: {SECRET}\n  nothing: 3\n",
        f"mirror: orders\nsource:\n  sasl.password: {SECRET}: x\n",
        f"mirror: orders\nsource:\n  sasl.password: ${{{SECRET}}}\n",
        f"%{SECRET}\nmirror: orders\n",
    ],
)
def test_no_refusal_repeats_a_secret(text: str) -> None:
    """Whatever is wrong around a secret, neither the message nor its traceback repeats it."""
    if "${" in text:
        return_text = refusal(text, {})
        assert "expected ${NAME}" in return_text
    else:
        refusal(text, {})


def test_node_settings_are_documents_too(tmp_path: Path) -> None:
    """A node's file has Kafka's names for Kafka's settings, and the same kind of errors."""
    path = tmp_path / "node.yaml"
    path.write_text(
        "destination:\n  bootstrap.servers: b:1\napi_port: 7000\nmirror.topic.num.partitions: 3\n",
        encoding="utf-8",
    )
    settings = load_node(path, {})
    assert (settings.api_host, settings.api_port) == ("127.0.0.1", 7000)
    assert settings.mirror_topic_num_partitions == 3
    path.write_text("destination:\n  bootstrap.servers: b:1\napi.prt: 7000\n", encoding="utf-8")
    with pytest.raises(
        SettingsError, match=r"node\.yaml:3: api\.prt: unknown setting; did you mean 'api_port'\?"
    ):
        load_node(path, {})
    with pytest.raises(SettingsError, match=r"^node settings: api_port: expected at most 65535, got 70000$"):
        node_from_document({"destination": {"bootstrap.servers": "b:1"}, "api_port": 70_000}, {})


def test_defaults_are_the_reference_designs() -> None:
    """Defaults that KIP-1279 gives are kept."""
    node = node_from_document({"destination": {"bootstrap.servers": "b:1"}}, {})
    assert node.mirror_topic_num_partitions == 50
    assert node.mirror_metadata_refresh_interval_ms == 30_000
    retry = node.retry_policy()
    assert (retry.initial_ms, retry.max_ms, retry.max_attempts) == (100, 300_000, 20)
    mirror = MirrorSettings.model_validate(
        {"mirror": "m", "source": {"bootstrap.servers": "a:1"}, "destination": {"bootstrap.servers": "b:1"}}
    )
    assert mirror.filters.topics_include == ()
    assert mirror.filters.topics_exclude == ("__.*",)
    assert mirror.filters.groups_include == (".*",)
    assert mirror.policies.source_log_start_beyond_cursor == "stop"
    assert mirror.source.request_timeout_ms == 30_000
