"""``python -m tests.compat [kafka|python|dagster ...]``: try other versions, then write docs/compatibility.md.

Results are kept in build/compat, so that a part can be run again; a run of everything takes the better part of an hour.
"""

import argparse
import os
import shutil
import signal
import subprocess
import sys
import time
import xml.etree.ElementTree as ET
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from tests.compat.matrix import CORE, DAGSTER, PAIRS, PYTHONS, UNIT, Outcome, Page, Results
from tests.compat.releases import DESTINATION_ENV, SOURCE_ENV

ROOT = Path(__file__).parents[2]
HOME = ROOT / "build" / "compat"
PAGE = ROOT / "docs" / "compatibility.md"
_LOWEST_DAGSTER = "1.13.0"
_TEST_S = 1_800


def main() -> int:
    """Command line; 1 when anything failed."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("kinds", nargs="*", choices=["kafka", "python", "dagster", "page"])
    parser.add_argument("--only", default="", help="combinations whose name holds this text")
    options = parser.parse_args()
    HOME.mkdir(parents=True, exist_ok=True)
    store = HOME / "results.json"
    kinds = options.kinds or ["kafka", "python", "dagster"]
    for kind in kinds:
        for outcome in _tried(kind, options.only):
            results = _kept(store)  # another part may run at the same time
            results.put(outcome)
            store.write_text(results.model_dump_json(indent=1))
            counts = f"{outcome.passed:5} passed {len(outcome.failed):3} failed {outcome.seconds:6.0f} s"
            sys.stdout.write(f"{kind:8} {outcome.what:24} {counts} {' '.join(outcome.failed[:2])}\n")
            sys.stdout.flush()
    results = _kept(store)
    PAGE.write_text(Page(results).text() + "\n", encoding="utf-8")
    return 0 if all(each.is_good for each in results.outcomes.values()) else 1


def _kept(store: Path) -> Results:
    return Results.model_validate_json(store.read_text()) if store.exists() else Results()


def _tried(kind: str, only: str) -> Iterator[Outcome]:
    if kind == "kafka":
        for source, destination in PAIRS:
            if only in f"{source} to {destination}":
                environ = {SOURCE_ENV: source, DESTINATION_ENV: destination}
                yield _run(kind, f"{source} to {destination}", Path(sys.executable), CORE, environ)
    elif kind == "python":
        for version in PYTHONS:
            if only in version:
                yield _in_environment(kind, version, f"python{version}", (), UNIT)
    elif kind == "dagster":
        for name, pins in (("lowest", (f"dagster=={_LOWEST_DAGSTER}", *_companions())), ("newest", ())):
            if only in name:
                yield _in_environment(kind, name, sys.executable, pins, DAGSTER)


def _companions() -> tuple[str, ...]:
    """Packages that are released together with Dagster."""
    return (f"dagster-webserver=={_LOWEST_DAGSTER}", f"dagster-graphql=={_LOWEST_DAGSTER}")


def _in_environment(kind: str, name: str, python: str, pins: Sequence[str], tests: Sequence[str]) -> Outcome:
    """Run tests in a virtual environment of their own."""
    found = _interpreter(python)
    if found is None:
        return Outcome(kind=kind, what=name, failed=[f"no {python} on this machine"])
    home = HOME / f"{kind}-{name}"
    interpreter = home / "bin" / "python"
    try:
        subprocess.run(
            [found, "-m", "venv", "--clear", str(home)], check=True, capture_output=True, text=True
        )
        install = [str(interpreter), "-m", "pip", "install", "--quiet", "--editable", f"{ROOT}[dev]", *pins]
        subprocess.run(install, check=True, capture_output=True, text=True, timeout=_TEST_S)
    except subprocess.CalledProcessError as error:
        return Outcome(kind=kind, what=name, failed=[error.stderr.strip().splitlines()[-1]])
    return _run(kind, _label(kind, name, interpreter), interpreter, tests, {})


def _interpreter(name: str) -> str | None:
    """An interpreter that runs; pyenv's stand-ins on the path do not when their version is not chosen."""
    folders = [*os.get_exec_path(), *map(str, Path.home().glob(".pyenv/versions/*/bin"))]
    for path in filter(None, (shutil.which(name, path=folder) for folder in folders)):
        if subprocess.run([path, "-V"], capture_output=True, check=False).returncode == 0:
            return path
    return None


def _label(kind: str, name: str, interpreter: Path) -> str:
    code = "import dagster, platform; print(dagster.__version__, platform.python_version())"
    shown = subprocess.run(
        [str(interpreter), "-c", code], check=True, capture_output=True, text=True
    ).stdout.split()
    return f"{shown[0]} ({name})" if kind == "dagster" else shown[1]


def _run(kind: str, what: str, python: Path, tests: Sequence[str], environ: Mapping[str, str]) -> Outcome:
    report = HOME / f"{kind}-{what.replace(' ', '-')}.xml"
    report.unlink(missing_ok=True)
    expanded = [str(path) for test in tests for path in (sorted(ROOT.glob(test)) or [test])]
    command = [str(python), "-m", "pytest", "-q", "-p", "no:cacheprovider", f"--junitxml={report}", *expanded]
    began = time.monotonic()
    with report.with_suffix(".log").open("w") as log:
        subprocess.run(
            command,
            cwd=ROOT,
            env={**os.environ, **environ},
            stdout=log,
            stderr=log,
            check=False,
            timeout=_TEST_S,
            # a shell's "&" makes children ignore it, and tests that send it would wait for ever
            preexec_fn=_take_interrupts,
        )
    seconds = time.monotonic() - began
    if not report.exists():
        return Outcome(kind=kind, what=what, failed=["the tests did not start"], seconds=seconds)
    cases = list(ET.parse(report).getroot().iter("testcase"))
    failed = [
        f"{case.get('classname', '').rpartition('.')[2]}::{case.get('name')}"
        for case in cases
        if case.find("failure") is not None or case.find("error") is not None
    ]
    return Outcome(kind=kind, what=what, passed=len(cases) - len(failed), failed=failed, seconds=seconds)


def _take_interrupts() -> None:
    signal.signal(signal.SIGINT, signal.SIG_DFL)


if __name__ == "__main__":
    sys.exit(main())
