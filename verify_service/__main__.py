"""python -m verify_service MODEL --listen ADDR"""

from __future__ import annotations

import argparse
import sys

from verify_service.server import add_arguments, run


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m verify_service", description="Serve a verifier over gRPC.")
    add_arguments(parser)
    return run(parser.parse_args())


if __name__ == "__main__":
    sys.exit(main())
