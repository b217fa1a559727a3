"""A service's options for traces and logs, which it passes on to processes that it starts."""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
from dataclasses import asdict, dataclass
from urllib.parse import urlsplit

from specwire.core.invalid import InvalidParameter
from specwire.telemetry import logs

# From a process to those that it starts; not for people.
INHERITED = "SPECWIRE_INHERITED_TELEMETRY"


@dataclass(frozen=True, slots=True)
class Telemetry:
    """traces: URL of a collector that speaks OTLP over HTTP; "" for none."""

    traces: str = ""
    log_format: str = logs.TEXT
    log_level: str = logs.DEFAULT_LEVEL

    def __post_init__(self) -> None:
        for name, value, known in (
            ("log-format", self.log_format, logs.FORMATS),
            ("log-level", self.log_level, logs.LEVELS),
        ):
            if value not in known:
                raise InvalidParameter(name, f"must be one of {', '.join(known)}, not {value!r}")
        if self.traces:
            _check_traces(self.traces)

    def start(self, service: str) -> None:
        """Trace and log so in this process, from now on, under this name; and in those that it starts."""
        logs.set_up(service, self.log_format, self.log_level)
        if self != Telemetry():
            os.environ[INHERITED] = json.dumps(asdict(self))
        if self.traces:
            from specwire.telemetry.tracing import export_to  # loads OpenTelemetry

            export_to(self.traces, service)


def _check_traces(url: str) -> None:
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise InvalidParameter("traces", f"must be a URL such as http://127.0.0.1:4318, not {url!r}")
    if not otel_is_installed():
        raise InvalidParameter("traces", "needs the extra: pip install 'specwire[otel]'")


def otel_is_installed() -> bool:
    try:
        return importlib.util.find_spec("opentelemetry.exporter.otlp.proto.http") is not None
    except ModuleNotFoundError:  # not even what is above it
        return False


def inherited() -> Telemetry:
    """What the process that started this one was told; the defaults where there is none."""
    said = os.environ.get(INHERITED)
    return Telemetry(**json.loads(said)) if said else Telemetry()


def telemetry_of(args: argparse.Namespace) -> Telemetry:
    """Raises InvalidParameter."""
    return Telemetry(args.traces, args.log_format, args.log_level)
