"""Names and references: nearest names, `${NAME}` anywhere in a text."""

import string

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from kmirror_dagster.errors import SettingsError
from kmirror_dagster.settings import ClusterSettings, mirror_from_document
from kmirror_dagster.settings.mirrors import MirrorSettings
from kmirror_dagster.settings.names import documented_name, is_secret, name_problems
from kmirror_dagster.settings.references import (
    ReferenceProblem,
    escape_references,
    has_reference,
    is_only_references,
    resolve,
    resolve_text,
)

VARIABLES = st.from_regex(r"[A-Z_][A-Z0-9_]{0,10}", fullmatch=True)
CLUSTER_NAMES = [documented_name(ClusterSettings, name) for name in ClusterSettings.model_fields]


@given(st.text())
def test_an_escaped_text_resolves_to_itself(text: str) -> None:
    """`$${` stands for `${`, so every text can be written."""
    escaped = escape_references(text)
    assert not has_reference(escaped)
    assert resolve_text(escaped, {}) == text


@given(st.lists(st.tuples(st.text().filter(lambda t: not t.endswith("$")), VARIABLES, st.text())))
def test_references_stand_anywhere_in_a_text(parts: list[tuple[str, str, str]]) -> None:
    """References are replaced wherever they stand, and what a variable holds is not looked at again."""
    environ = {name: value for _, name, value in parts}
    written = "".join(f"{escape_references(text)}${{{name}}}" for text, name, _ in parts)
    assert resolve_text(written, environ) == "".join(text + environ[name] for text, name, _ in parts)
    assert is_only_references("".join(f"${{{name}}}" for _, name, _ in parts)) is bool(parts)


@pytest.mark.parametrize("text", ["${", "${A", "${}", "${A B}", "${1A}", "${A-b}", "${A:-default}", "${ä}"])
def test_malformed_references_are_refused(text: str) -> None:
    """A reference that cannot be one is refused instead of being taken literally."""
    assert has_reference(text)
    with pytest.raises(ReferenceProblem, match="expected"):
        resolve_text(text, {"A": "x"})


@pytest.mark.parametrize("text", ["$", "$A", "a$b", "{A}", "$ {A}", "cost: 3$"])
def test_other_dollars_are_literal(text: str) -> None:
    """Only `${` begins a reference."""
    assert resolve_text(text, {"A": "x"}) == text
    assert not has_reference(text)


def test_each_unresolved_reference_is_told_with_its_place() -> None:
    """Resolving goes through lists and sections and tells where something is missing."""
    values, problems = resolve({"a": ["${A}", {"b": "${B}"}], "c": 3, "d": None}, {"A": "x"})
    assert values == {"a": ["x", {"b": "${B}"}], "c": 3, "d": None}
    assert [path for path, _ in problems] == [("a", 1, "b")]


@given(
    st.sampled_from([name for name in CLUSTER_NAMES if len(name) > 6]),
    st.integers(0, 100),
    st.sampled_from("xq_"),
)
def test_one_wrong_letter_finds_the_name(name: str, place: int, letter: str) -> None:
    """A setting with one letter changed, added or left out leads to a known name very close to it."""
    at = place % len(name)
    for wrong in (
        name[:at] + letter + name[at + 1 :],
        name[:at] + letter + name[at:],
        name[:at] + name[at + 1 :],
    ):
        plain = wrong.lower().replace("_", ".")
        assume(plain not in CLUSTER_NAMES and wrong not in ClusterSettings.model_fields)
        (problem,) = name_problems({wrong: "x"}, ClusterSettings)
        assert problem.path == (wrong,)
        assert "did you mean '" in problem.message or "use " in problem.message


@given(st.dictionaries(st.text(string.ascii_letters + "._", min_size=1), st.integers(), max_size=4))
def test_any_unknown_names_are_one_line(document: dict[str, int]) -> None:
    """Whatever names a document has, the refusal is one line and not an error of another kind."""
    with pytest.raises(SettingsError) as caught:
        mirror_from_document({"mirror": "m", **document, "source": document}, {})
    assert "\n" not in str(caught.value)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=10,
)


@given(
    st.fixed_dictionaries(
        {},
        optional={
            "mirror": JSON,
            "source": JSON | st.dictionaries(st.sampled_from(CLUSTER_NAMES), JSON, max_size=4),
            "destination": JSON,
            "filters": JSON
            | st.fixed_dictionaries({}, optional={"topics.include": JSON, "acls.include": JSON}),
            "policies": JSON | st.fixed_dictionaries({}, optional={"start": JSON, "failover": JSON}),
        },
    )
)
def test_any_json_is_settings_or_one_line(document: dict[str, object]) -> None:
    """No JSON document that a client sends leads to anything but settings or a refusal."""
    try:
        settings = mirror_from_document(document, {})
    except SettingsError as error:
        assert len(str(error).splitlines()) == 1
    else:
        assert settings.mirror == document["mirror"]


def test_secrets_are_known_in_both_spellings() -> None:
    """Secret settings are recognized by path, however they are written."""
    assert is_secret(MirrorSettings, ("source", "sasl.password"))
    assert is_secret(MirrorSettings, ("destination", "ssl_key_password"))
    assert is_secret(MirrorSettings, ("source", "sasl.oauthbearer.client.secret"))
    assert not is_secret(MirrorSettings, ("source", "sasl.username"))
    assert not is_secret(MirrorSettings, ("policies", "start", "timestamp"))
