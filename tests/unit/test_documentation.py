"""What the documentation shows is what the code does."""

import ast
import os
import re
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import yaml
from dagster.components.testing import create_defs_folder_sandbox

from docs.generators.commands_page import command_tree
from docs.generators.pages import PAGES
from kmirror_dagster.settings import load_node, parse_mirror
from tests.helpers.documents import DOCS, ROOT, Block, blocks, commands, pages

_VARIABLE = re.compile(r"\$\{(\w+)\}")
# What else is shown; where a program is not ours, its own documentation has the last word.
_OTHERS = {
    *(
        ".",
        "apt-get",
        "cd",
        "cp",
        "create-dagster",
        "curl",
        "dagster",
        "dg",
        "do",
        "docker",
        "docker/secrets.sh",
        "done",
        "export",
        "for",
    ),
    *("kubectl", "mkdir", "pip", "promtool", "python", "sleep", "systemctl", "until", "uv", "cat"),
}


@pytest.mark.parametrize("name", PAGES)
def test_generated_page_is_current(name: str) -> None:
    """A generated page is what its generator writes; write all anew with: make docs."""
    assert (DOCS / name).read_text(encoding="utf-8") == PAGES[name](), "run: make docs"


def test_shown_commands_exist() -> None:
    """Each `kmirror` command in the documentation exists, with these options and so many arguments."""
    shown = [(page, words[1:]) for page, words in commands() if words[0] == "kmirror"]
    assert len(shown) > 20
    for page, words in shown:
        problem = _problem_of(words)
        assert problem is None, f"{page.relative_to(ROOT)}: kmirror {' '.join(words)}: {problem}"


def _problem_of(words: list[str]) -> str | None:
    """What is wrong with a command line of ours; None when nothing is."""
    command, context = command_tree()
    rest = _without_options(command, words)
    while hasattr(command, "list_commands"):
        if isinstance(rest, str):
            return rest
        if not rest:
            return None  # `kmirror` or a group alone shows its help
        child = command.get_command(context, rest[0])
        if child is None:
            return f"no command {rest[0]}"
        context = child.context_class(child, info_name=rest[0], parent=context)
        command, rest = child, _without_options(child, rest[1:])
    if isinstance(rest, str):
        return rest
    arguments = [each for each in command.params if each.param_type_name == "argument"]
    needed = sum(each.required for each in arguments)
    most = None if any(each.nargs == -1 for each in arguments) else len(arguments)
    if "..." in rest:
        return None  # shown cut off on purpose
    return f"{len(rest)} arguments" if len(rest) < needed or (most is not None and len(rest) > most) else None


def _without_options(command: Any, words: Iterable[str]) -> list[str] | str:
    """The words that are no options of this command, or what is wrong; a group's options end at its command."""
    options = {
        name: each
        for each in command.params
        if each.param_type_name == "option"
        for name in (*each.opts, *each.secondary_opts)
    }
    rest: list[str] = []
    waiting = list(words)
    while waiting:
        word = waiting.pop(0)
        if not word.startswith("-") or (rest and hasattr(command, "list_commands")):
            rest.append(word)
            continue
        if word == "--help":
            return []
        option = options.get(word.partition("=")[0])
        if option is None:
            return f"no option {word}"
        if not option.is_flag and "=" not in word:
            if not waiting:
                return f"{word} needs a value"
            waiting.pop(0)
    return rest


def test_shown_programs_are_known() -> None:
    """`make` targets exist; every other program shown is one on the list."""
    targets = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.M))
    for page, words in commands():
        program = next((word for word in words if "=" not in word), "kmirror")
        if program == "make":
            assert {word for word in words[1:] if "=" not in word} <= targets, (page, words)
        else:
            assert Path(program).name in _OTHERS | {"kmirror"} or program in _OTHERS, (page, words)


@pytest.mark.parametrize("block", blocks("yaml"), ids=str)
def test_shown_settings_are_accepted(block: Block) -> None:
    """Each YAML document that is shown can be read, and is valid when it is one of ours."""
    document = yaml.safe_load(block.text)
    environ = dict.fromkeys(_VARIABLE.findall(block.text), "value")
    if isinstance(document, dict) and {"mirror", "source"} <= document.keys():
        parse_mirror(block.text, str(block), environ=environ)


def test_shown_node_settings_are_accepted(tmp_path: Path) -> None:
    """Each YAML document of a node that is shown is valid."""
    found = 0
    for block in blocks("yaml"):
        document = yaml.safe_load(block.text)
        if isinstance(document, dict) and "destination" in document and "mirror" not in document:
            found += 1
            path = tmp_path / f"{found}.yaml"
            path.write_text(block.text)
            load_node(path, dict.fromkeys(_VARIABLE.findall(block.text), "value"))


@pytest.mark.filterwarnings("ignore:.* is currently in beta", "ignore:`parse_obj_as` is deprecated")
def test_shown_component_loads() -> None:
    """Each `defs.yaml` that is shown loads, with the files that it names beside it."""
    (mirror,) = (block for block in blocks("yaml") if block.text.startswith("# orders.yaml"))
    found = [block for block in blocks("yaml") if "type: kmirror_dagster." in block.text]
    assert found
    for block in found:
        with create_defs_folder_sandbox() as sandbox:
            folder = sandbox.defs_folder_path / "mirrors"
            folder.mkdir()
            (folder / "defs.yaml").write_text(block.text)
            for name in re.findall(r"document: (\S+)", block.text):
                (folder / name).write_text(mirror.text)
            with sandbox.build_all_defs() as defs:
                assert defs.resolve_all_asset_specs()


@pytest.mark.parametrize("block", blocks("python"), ids=str)
def test_shown_code_is_code(block: Block, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Each Python block compiles; one that makes definitions makes them."""
    tree = ast.parse(block.text)
    stored = (
        node for node in ast.walk(tree) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)
    )
    if any(name.id == "defs" for name in stored):
        monkeypatch.chdir(tmp_path)
        for document in blocks("yaml"):
            settings = yaml.safe_load(document.text)
            if isinstance(settings, dict) and "mirror" in settings:
                Path(document.text.splitlines()[0].removeprefix("# ").strip() or "x").write_text(
                    document.text
                )
        defined: dict[str, Any] = {}
        exec(compile(tree, str(block), "exec"), defined)
        assert defined["defs"].resolve_all_asset_specs()


def test_named_tests_exist() -> None:
    """Every test file and test function that a page names exists."""
    files = {path.name for path in (ROOT / "tests").rglob("test_*.py")}
    text = "\n".join(path.read_text(encoding="utf-8") for path in (ROOT / "tests").rglob("test_*.py"))
    functions = set(re.findall(r"def (test_\w+)", text))
    for page in pages():
        for name in re.findall(r"`(?:tests/\w+/)?(test_\w+(?:\.py)?)`", page.read_text(encoding="utf-8")):
            assert name in files or name in functions, f"{page.relative_to(ROOT)} names {name}"


def test_site_builds_with_all_links(tmp_path: Path) -> None:
    """The site builds, and no link inside it leads nowhere."""
    built = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path / "site")],
        cwd=ROOT,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert built.returncode == 0, built.stderr
    assert (tmp_path / "site" / "index.html").exists()
