"""python -m draft_service MODEL --listen ADDR"""

from __future__ import annotations

import argparse
import sys

from draft_service.server import add_arguments, run


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m draft_service", description="Serve a drafter over gRPC.")
    add_arguments(parser)
    return run(parser.parse_args())


if __name__ == "__main__":
    sys.exit(main())
