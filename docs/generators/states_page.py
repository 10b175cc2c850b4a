"""Reference of the states of a mirror partition."""

from docs.generators.markdown import head, section, table
from kmirror_dagster.lifecycle import (
    MEANINGS,
    SETTLED_STATES,
    DesiredState,
    MirrorState,
    completion_of,
    is_allowed,
    next_state,
    retry_target,
)

_TEXT = """\
Every mirror partition has a state of its own, kept in `__mirror_state`; what is wanted of its topic (`MIRRORING`,
`PAUSED` or `STOPPED`) is kept apart from it. Names and rules are those of KIP-1279."""


def page() -> str:
    """The whole page."""
    states = [
        (f"`{state}`", MEANINGS[state], "yes" if state in SETTLED_STATES else "", _name(completion_of(state)))
        for state in MirrorState
    ]
    transitions = [
        (_name(before), ", ".join(f"`{after}`" for after in MirrorState if _may_follow(before, after)))
        for before in (None, *MirrorState)
    ]
    steps = [
        (_name(before), *(_name(next_state(before, wanted)) for wanted in DesiredState))
        for before in (None, *MirrorState)
    ]
    retries = [(_name(before), _name(retry_target(before))) for before in (None, *MirrorState)]
    return "".join(
        (
            head("States", "kmirror_dagster/lifecycle.py", _TEXT),
            section(
                "The states",
                "Settled: nothing is left to do until somebody wants something else.",
                table(("state", "meaning", "settled", "then"), states),
            ),
            section(
                "What may follow",
                "`FAILED` may besides go back to the state it came from. Anything else is refused.",
                table(("state", "may be followed by"), transitions),
            ),
            section(
                "What is done next",
                "An empty cell: the state is worked on as it is, or nothing is to be done.",
                table(("state", *(f"wanted: `{wanted}`" for wanted in DesiredState)), steps),
            ),
            section(
                "Retrying what FAILED",
                "With full-jitter back-off (`mirror.failed.retry.*`), into:",
                table(("failed in", "retried into"), retries),
            ),
        )
    )


def _name(state: MirrorState | None) -> str:
    return f"`{state}`" if state is not None else ""


def _may_follow(before: MirrorState | None, after: MirrorState) -> bool:
    return before is not after and is_allowed(before, after)
