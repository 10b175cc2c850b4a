"""Reading a YAML file into a document.

Scalars follow YAML 1.2's core schema without octal and hexadecimal numbers (`on` and `no` are text, times
stay text), so that a document is JSON as well.
"""

import re
from pathlib import Path
from typing import Any

import yaml

from kmirror_dagster.errors import SettingsError
from kmirror_dagster.settings.documents import Document, SettingPath, format_path

MAX_FILE_BYTES = 1_000_000
MAX_NODES = 50_000  # a handful of aliases can stand for billions of values

_TAG = "tag:yaml.org,2002:"
_MERGE = f"{_TAG}merge"
_DIGITS = list("-+.0123456789")


class _CoreLoader(yaml.SafeLoader):
    """Loader that resolves null, true/false, decimal numbers and merge keys only; all else is text."""

    yaml_implicit_resolvers: Any = {}  # noqa: RUF012 - PyYAML's class attribute; filled by the calls below


for _kind, _pattern, _first in (
    ("null", r"(?:~|null|Null|NULL|)\Z", ["~", "n", "N", ""]),
    ("bool", r"(?:true|True|TRUE|false|False|FALSE)\Z", list("tTfF")),
    ("int", r"[-+]?[0-9]{1,18}\Z", _DIGITS),
    (
        "float",
        r"[-+]?(?:[0-9]{1,18}\.[0-9]{0,18}|\.[0-9]{1,18}|[0-9]{1,18}(?=[eE]))(?:[eE][-+]?[0-9]{1,2})?\Z",
        _DIGITS,
    ),
    ("merge", r"<<\Z", ["<"]),
):
    _CoreLoader.add_implicit_resolver(_TAG + _kind, re.compile(_pattern), _first)


def read_file(path: Path) -> Document:
    """Read a settings file.

    Raises:
        SettingsError: when it cannot be read or is not YAML; one line that names the file.
    """
    try:
        with path.open("rb") as file:
            data = file.read(MAX_FILE_BYTES + 1)
        text = data.decode("utf-8-sig")
    except FileNotFoundError:
        raise SettingsError(f"{path}: no such file; check the path, or write the settings there") from None
    except UnicodeDecodeError as error:
        raise SettingsError(f"{path}: not UTF-8 text (byte {error.start}); save it as UTF-8") from None
    except OSError as error:
        raise SettingsError(f"{path}: cannot be read: {error.strerror or error}") from error
    if len(data) > MAX_FILE_BYTES:
        raise SettingsError(
            f"{path}: larger than {MAX_FILE_BYTES} bytes; settings are smaller, check the path"
        )
    return read_yaml(text, str(path))


def read_yaml(text: str, name: str) -> Document:
    """Read YAML text that holds one mapping.

    Raises:
        SettingsError: when it is not YAML, holds no mapping, or gives a setting twice. YAML's own error is
            left behind: it quotes the line, and the line may hold a secret.
    """
    try:
        root = yaml.compose(text, Loader=_CoreLoader)
        if root is None:
            raise SettingsError(f"{name}: is empty; write the settings there")
        reader = _Reader(name)
        if not isinstance(root, yaml.MappingNode):
            raise reader.refused(root, (), "expected settings, each as name: value")
        return Document(name=name, values=reader.mapping(root, ()), lines=reader.lines)
    except yaml.reader.ReaderError as error:
        line = text.count("\n", 0, error.position) + 1
        raise SettingsError(f"{name}:{line}: not valid YAML: a character that is not allowed") from None
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        where = f"{name}:{mark.line + 1}" if mark else name
        raise SettingsError(f"{where}: not valid YAML: {_problem(error)}") from None
    except RecursionError:
        raise SettingsError(f"{name}: not valid settings: nested too deeply") from None


def _problem(error: yaml.MarkedYAMLError) -> str:
    problem = str(error.problem or error.context or "syntax error")
    if "undefined alias" in problem:
        return "a value that begins with * has to be put in quotes"
    if "found another document" in problem:
        return "more than one document in the file; write one file for each"
    # anchors, tags and directives are text of the document, possibly of a secret
    return re.sub(r"'([^']*)'", lambda m: m[0] if len(m[1]) < 2 or m[1].startswith("<") else "'...'", problem)


class _Reader:
    """Turns YAML nodes into values, noting lines."""

    def __init__(self, name: str) -> None:
        self.lines: dict[SettingPath, int] = {}
        self._name = name
        self._nodes = 0
        self._open: set[int] = set()

    def refused(self, node: yaml.Node, path: SettingPath, message: str) -> SettingsError:
        where = f"{self._name}:{node.start_mark.line + 1}"
        return SettingsError(": ".join(part for part in (where, format_path(path), message) if part))

    def mapping(self, node: yaml.MappingNode, path: SettingPath) -> dict[str, Any]:
        values: dict[str, Any] = {}
        merged: list[yaml.Node] = []
        for key_node, value_node in node.value:
            if key_node.tag == _MERGE:
                merged.append(value_node)
                continue
            key = self._key(key_node, path)
            where = (*path, key)
            if key in values:
                raise self.refused(
                    key_node, where, f"given twice (first on line {self.lines[where]}); remove one"
                )
            self.lines[where] = key_node.start_mark.line + 1
            values[key] = self._value(value_node, where)
        for source in merged:
            self._merge(source, values, path)
        return values

    def _merge(self, source: yaml.Node, values: dict[str, Any], path: SettingPath) -> None:
        """Add what `<<: *anchor` brings along; what is written at the place itself wins."""
        sources = source.value if isinstance(source, yaml.SequenceNode) else [source]
        for mapping in sources:
            if not isinstance(mapping, yaml.MappingNode):
                raise self.refused(source, (*path, "<<"), "expected an alias of a section, such as *base")
            self._enter(mapping, path)
            for key_node, value_node in mapping.value:
                if key_node.tag == _MERGE:
                    self._merge(value_node, values, path)
                    continue
                key = self._key(key_node, path)
                if key not in values:
                    self.lines[(*path, key)] = key_node.start_mark.line + 1
                    values[key] = self._value(value_node, (*path, key))
            self._open.discard(id(mapping))

    def _key(self, node: yaml.Node, path: SettingPath) -> str:
        if not isinstance(node, yaml.ScalarNode) or node.tag != f"{_TAG}str":
            raise self.refused(node, path, "expected a setting's name before the colon")
        return str(node.value)

    def _enter(self, node: yaml.Node, path: SettingPath) -> None:
        self._nodes += 1
        if self._nodes > MAX_NODES:
            raise self.refused(node, path, f"more than {MAX_NODES} values")
        if id(node) in self._open:
            raise self.refused(node, path, "an alias refers to what it is part of")
        self._open.add(id(node))

    def _value(self, node: yaml.Node, path: SettingPath) -> Any:
        self._enter(node, path)
        try:
            if isinstance(node, yaml.MappingNode):
                return self.mapping(node, path)
            if isinstance(node, yaml.SequenceNode):
                values: list[Any] = []
                for index, item in enumerate(node.value):
                    self.lines[(*path, index)] = item.start_mark.line + 1
                    values.append(self._value(item, (*path, index)))
                return values
            return self._scalar(node, path)
        finally:
            self._open.discard(id(node))

    def _scalar(self, node: yaml.Node, path: SettingPath) -> str | int | float | bool | None:
        text = str(node.value)
        kind = str(node.tag).removeprefix(_TAG)
        try:
            if kind in ("str", "merge"):
                return text
            if kind == "null":
                return None
            if kind == "bool":
                return {"true": True, "false": False}[text.lower()]
            if kind in ("int", "float"):
                return int(text) if kind == "int" else float(text)
        except (ValueError, KeyError):
            raise self.refused(node, path, f"not what its tag !!{kind} says; remove the tag") from None
        raise self.refused(
            node, path, "a tag (!...) has no use here; put a value that begins with ! in quotes"
        )
