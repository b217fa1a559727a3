"""`python -m orchestrator`: see `orchestrator.server`."""

from __future__ import annotations

import argparse
import sys

from orchestrator.server import add_arguments, run

if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m orchestrator", description="Run an orchestrator.")
    add_arguments(parser)
    sys.exit(run(parser.parse_args()))
