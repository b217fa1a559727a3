"""Keeps the table of session states in proto/PROTOCOL.md equal to specwire.core.session.TRANSITIONS.

python -m scripts.protocol_table --write    put the table in
python -m scripts.protocol_table --check    exit 1 if the one that is there differs
"""

import argparse
import sys
from pathlib import Path

from specwire.core.session import TRANSITIONS, State

PAGE = Path(__file__).resolve().parent.parent / "proto" / "PROTOCOL.md"
BEGIN = "<!-- states: written by scripts/protocol_table.py -->"
END = "<!-- end of states -->"


def cell(targets: frozenset[State]) -> str:
    """Name the states that an event may lead to, in the order of their declaration."""
    return " or ".join(state for state in State if state in targets)


def table() -> str:
    """Render TRANSITIONS: a row for each event, a column for each state."""
    rows = [["event \\ state", *State], ["---"] * (len(State) + 1)]
    for event, transitions in TRANSITIONS.items():
        rows.append([event.__name__, *(cell(transitions.get(state, frozenset())) for state in State)])
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def with_table(page: str) -> str:
    """Replace what stands between the markers; raises ValueError where a marker is missing or the order is wrong."""
    before, begin, rest = page.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"{PAGE.name}: needs the markers {BEGIN} and {END}, in this order")
    return f"{before}{BEGIN}\n\n{table()}\n\n{END}{after}"


def main() -> int:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    mode = parser.add_mutually_exclusive_group(required=True)
    mode.add_argument("--write", action="store_true", help="write the table")
    mode.add_argument("--check", action="store_true", help="write nothing; exit 1 on a difference")
    arguments = parser.parse_args()
    have = PAGE.read_text()
    want = with_table(have)
    if arguments.write:
        PAGE.write_text(want)
    elif have != want:
        print("PROTOCOL.md: the table of states differs from the core's: run python -m scripts.protocol_table --write")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
