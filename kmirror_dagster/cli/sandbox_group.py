"""`kmirror sandbox`: its commands are imported when one is called, its packages are an extra."""

from importlib import import_module
from typing import Any

import typer
from typer.core import TyperGroup

from kmirror_dagster.errors import UsageError

_MODULE = "kmirror_dagster.sandbox.commands"
_APP = "sandbox_app"


class SandboxGroup(TyperGroup):
    """A group whose commands are those of `kmirror_dagster.sandbox.commands.sandbox_app`."""

    def list_commands(self, ctx: Any) -> list[str]:
        """Names of the sandbox's commands."""
        return self._loaded(ctx).list_commands(ctx)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """One of the sandbox's commands."""
        return self._loaded(ctx).get_command(ctx, cmd_name)

    def _loaded(self, ctx: Any) -> TyperGroup:
        loaded = ctx.meta.get(_MODULE)
        if loaded is None:
            loaded = ctx.meta[_MODULE] = _load()
        return loaded


def _load() -> TyperGroup:
    try:
        group = typer.main.get_command(getattr(import_module(_MODULE), _APP))
    except ModuleNotFoundError as error:
        if error.name is not None and error.name.startswith("kmirror_dagster"):
            raise
        raise UsageError(
            f"the sandbox needs the package {error.name}: pip install 'kmirror-dagster[sandbox]'"
        ) from error
    if not isinstance(group, TyperGroup):
        raise TypeError(f"{_MODULE}.{_APP} has no commands")
    return group
