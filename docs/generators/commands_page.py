"""Reference of the command line."""

import inspect
from collections.abc import Iterator
from enum import Enum
from typing import Any

import typer

from docs.generators.markdown import head, paragraphs, section, table
from kmirror_dagster.cli.boundary import EXIT_CODES
from kmirror_dagster.cli.main import app


def page() -> str:
    """The whole page."""
    root, context = command_tree()
    text = f"{root.help} {EXIT_CODES}"
    parts = [head("Commands", "kmirror_dagster/cli", text)]
    parts.append(section("Options of all commands", "Given before the command.", _options(root)))
    for name, command in leaves(root, context):
        parts.append(section(f"`kmirror {name}`", paragraphs(command.help), _usage(name, command)))
    return "".join(parts)


def command_tree() -> tuple[Any, Any]:
    """The root command, and a context to ask it in."""
    root: Any = typer.main.get_command(app)
    return root, root.context_class(root, info_name="kmirror")


def leaves(group: Any, context: Any, before: str = "") -> Iterator[tuple[str, Any]]:
    """Every command that does something, with its words."""
    for name in group.list_commands(context):
        command = group.get_command(context, name)
        words = f"{before} {name}".strip()
        if command.hidden:
            continue
        if hasattr(command, "list_commands"):
            yield from leaves(command, command.context_class(command, info_name=name, parent=context), words)
        else:
            yield words, command


def _usage(words: str, command: Any) -> str:
    arguments = [each for each in command.params if each.param_type_name == "argument"]
    usage = " ".join(["kmirror", words, "[OPTIONS]", *(_argument(each) for each in arguments)])
    rows = [(f"`{_label(each)}`", each.help or "") for each in arguments if getattr(each, "help", None)]
    parts = [f"    {usage}", table(("argument", "meaning"), rows) if rows else "", _options(command)]
    return "\n\n".join(part for part in parts if part)


def _argument(argument: Any) -> str:
    label = _label(argument) + ("..." if argument.nargs == -1 else "")
    return label if argument.required else f"[{label}]"


def _label(argument: Any) -> str:
    return str(argument.metavar or argument.name.upper()).strip("[]")


def _options(command: Any) -> str:
    rows = [
        (_spelling(each), _default(each), each.help or "")
        for each in command.params
        if each.param_type_name == "option" and not each.hidden and "--help" not in each.opts
    ]
    return table(("option", "default", "meaning"), rows) if rows else ""


def _spelling(option: Any) -> str:
    names = ", ".join(f"`{name}`" for name in (*option.opts, *option.secondary_opts))
    value = "" if option.is_flag else f" `{option.metavar or _type_name(option)}`"
    return names + value + (", repeatable" if option.multiple else "")


def _type_name(option: Any) -> str:
    # Typer's later versions bring parser classes of their own
    descriptor = getattr(option, "type_descriptor", None)
    kind = option.type if descriptor is None else descriptor.annotation
    choices = kind if inspect.isclass(kind) and issubclass(kind, Enum) else getattr(kind, "choices", None)
    if choices:
        return " or ".join(str(getattr(choice, "value", choice)) for choice in choices)
    return str(getattr(kind, "name", None) or getattr(kind, "__name__", "VALUE")).upper()


def _default(option: Any) -> str:
    value = option.default
    # frameworks of different versions mark "no default" differently: only plain values are shown
    if isinstance(value, bool) or not isinstance(value, (str, int, float)) or value == "":
        return ""
    return f"`{value}`"
