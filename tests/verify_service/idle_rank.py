"""Another rank in all but the model: it says that it is there, and then waits for its stdin to end."""

from __future__ import annotations

import json
import sys

sys.stdout.write(json.dumps({"rank": 1}) + "\n")
sys.stdout.flush()
sys.stdin.buffer.read()
