"""Figures that every process has."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from operator import attrgetter

from prometheus_client import PROCESS_COLLECTOR, Metric, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.registry import Collector

from specwire import __version__
from specwire.core.messages import SourceKind
from specwire.telemetry.tally import DraftCounts, Histogram

# ----------------------------------------------------------------------------------------------------------------------
# Figures in Prometheus' text form, version 0.0.4.
#
# Nothing is pushed: counters are plain numbers, and `Families` are made of them at a scrape. So counting costs an
# addition without a lock, and a service that is not scraped pays for nothing else.

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
PREFIX = "specwire:"
# Names that have it already are another server's, for tools that know only those.
VLLM = "vllm:"

Families = Iterable[Metric]
counter = CounterMetricFamily
gauge = GaugeMetricFamily


def histogram(name: str, text: str, values: Histogram) -> Metric:
    return HistogramMetricFamily(name, text, values.buckets(), values.sum)


def by_labels(
    kind: type[CounterMetricFamily | GaugeMetricFamily],
    name: str,
    text: str,
    labels: Sequence[str],
    samples: Iterable[tuple[Sequence[str], float]],
) -> Metric:
    """samples: the labels' values, and what counts for them."""
    family = kind(name, text, labels=labels)
    for values, value in samples:
        family.add_metric(values, value)
    return family


def by_label(
    kind: type[CounterMetricFamily | GaugeMetricFamily], name: str, text: str, label: str, values: Mapping[str, float]
) -> Metric:
    """One sample for each value of the label, in their order."""
    return by_labels(kind, name, text, (label,), (((each,), value) for each, value in values.items()))


def draft_families(drafts: Mapping[SourceKind, DraftCounts]) -> Families:
    """Samples of draft tokens and what became of them, by who proposed them."""
    told = (
        ("draft", "Draft tokens put to the target, by where they came from.", attrgetter("proposed")),
        ("tested", "Of these, those that were judged, all before them having been accepted.", attrgetter("tested")),
        ("accepted", "Of these, those that were accepted.", attrgetter("accepted")),
    )
    for name, text, of in told:
        values = {kind.name.lower(): of(counts) for kind, counts in drafts.items()}
        yield by_label(counter, f"spec_decode_num_{name}_tokens_total", text, "kind", values)


class Registry(Collector):
    """The metrics of one process, which may run several services: every sample has the label `service`."""

    def __init__(self) -> None:
        self._services: list[tuple[str, Callable[[], Families]]] = []

    def add(self, service: str, families: Callable[[], Families]) -> None:
        """Add a source, which `families` reads at each scrape."""
        self._services.append((service, families))

    def include(self, other: Registry, service: str = "") -> None:
        """Add the sources that `other` has by now, as `service`'s if it is named."""
        self._services += [(service or own, families) for own, families in other._services]

    def collect(self) -> Families:
        """Families of one name are merged; the first one's help text counts."""
        shown: dict[str, Metric] = {}
        for service, families in self._services:
            for family in families():
                prefix = "" if family.name.startswith(VLLM) else PREFIX
                name = prefix + family.name
                whole = shown.setdefault(name, Metric(name, family.documentation, family.type))
                for sample in family.samples:
                    whole.add_sample(prefix + sample.name, {"service": service, **sample.labels}, sample.value)
        return shown.values()

    def text(self) -> str:
        return generate_latest(self).decode()


def process_families() -> Families:
    yield by_label(gauge, "build_info", "1; what runs.", "version", {__version__: 1})
    yield from PROCESS_COLLECTOR.collect()
