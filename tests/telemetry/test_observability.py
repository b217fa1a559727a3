"""Dashboard, alerts and scrape example against the figures of running services: no name that is not there."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from contextlib import aclosing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from deploy.stack.options import StackOptions
from specwire.client import Chunk, Finished, Stats
from specwire.core.messages import Discipline, SourceKind
from tests.orchestrator.stack import ALL, PROMPT, held
from tests.telemetry.promql import ADDED, PREFIX, grouped, selected
from tests.telemetry.stack import Observed, observed
from tests.wait import asked

FOLDER = Path(__file__).resolve().parents[2] / "deploy" / "observability"
HISTOGRAM = ("_bucket", "_sum", "_count")


@dataclass
class Figures:
    """types: by name. labels: of the samples that there were, with their values."""

    types: dict[str, str] = field(default_factory=dict)
    values: dict[tuple[str, frozenset[tuple[str, str]]], float] = field(default_factory=dict)

    def read(self, page: str) -> None:
        """Prometheus' own parser, then the types, which it names otherwise."""
        for line in page.splitlines():
            if line.startswith("# TYPE "):
                name, kind = line.split()[2:]
                self.types[name.removeprefix(PREFIX)] = kind
        for family in text_string_to_metric_families(page):
            for sample in family.samples:
                at = (sample.name.removeprefix(PREFIX), frozenset(sample.labels.items()))
                assert at not in self.values or not sample.labels
                self.values[at] = sample.value

    def type_of(self, name: str) -> str | None:
        if name in self.types:
            return self.types[name]
        whole = next((name.removesuffix(end) for end in HISTOGRAM if name.endswith(end)), "")
        return "histogram part" if self.types.get(whole) == "histogram" else None

    def labels(self, name: str) -> set[str]:
        return {label for at, labels in self.values if at == name for label, _ in labels}

    def sum(self, name: str, **wanted: str) -> float:
        found = [n for (at, labels), n in self.values.items() if at == name and labels >= frozenset(wanted.items())]
        assert found, (name, wanted)
        return sum(found)


async def gathered(stack: Observed) -> Figures:
    figures = Figures()
    for service in stack.addresses:
        figures.read(await stack.page(service))
    return figures


async def written(stack: Observed) -> tuple[Stats, Figures, Figures, Figures]:
    """A text's own figures, and what all services told before it, in the middle of it and after it."""
    before, during, finished = await gathered(stack), Figures(), None
    with held(8) as let_go:
        async with aclosing(stack.client.generate(PROMPT, max_tokens=60, ignore_eos=True)) as events:
            async for event in events:
                if isinstance(event, Chunk) and not during.types and event.position > len(PROMPT) + 5:
                    during = await gathered(stack)
                    let_go(ALL)
                finished = event if isinstance(event, Finished) else None
    assert finished is not None
    return finished.stats, before, during, await gathered(stack)


async def test_what_is_counted_is_what_happened_and_all_that_is_shown_exists() -> None:
    async with observed() as stack:
        stats, before, during, after = await asked(lambda: written(stack), lambda told: told[0].accepted > 0)

        def grew(name: str, **labels: str) -> float:
            return after.sum(name, **labels) - before.sum(name, **labels)

        at = {"service": "orchestrator"}
        assert grew("generation_tokens_total", **at) == stats.output_tokens == 60
        assert grew("spec_decode_num_draft_tokens_total", **at) == stats.proposed > 0
        assert grew("spec_decode_num_tested_tokens_total", **at) == stats.tested > 0
        assert grew("spec_decode_num_accepted_tokens_total", **at) == stats.accepted > 0
        assert grew("target_forwards_saved_total", **at) == stats.forwards_saved
        assert grew("target_forwards_total", **at) == stats.target_forwards
        assert grew("prompt_tokens_total", **at) == len(PROMPT)
        for name in ("time_to_first_token", "e2e_request_latency", "request_queue_time"):
            assert grew(f"{name}_seconds_count", **at) == 1
        assert 1 <= grew("inter_token_latency_seconds_count", **at) <= 59
        assert grew("log_append_seconds_count", **at) >= 1
        assert after.sum("spec_decode_num_accepted_tokens_per_pos_total", **at) <= stats.accepted
        assert during.sum("sessions", **at, state="running") == 1 > after.sum("sessions", **at, state="running")
        assert during.sum("drafting_plans", **at) == 1
        ((labels, _),) = ((dict(key[1]), value) for key, value in during.values.items() if key[0] == "drafting_plans")
        assert labels["discipline"] in set(Discipline)
        assert labels["reason"]
        assert not any(character.isdigit() for character in labels["reason"])
        assert after.sum("links_up", **at) == 2
        assert after.sum("link_round_trip_seconds", role="verifier") > 0

        at = {"service": "verifier"}
        assert grew("decided_tokens_total", **at) == 60
        assert after.sum("tenant_decided_tokens_total", **at, tenant="other") == after.sum("decided_tokens_total", **at)
        assert during.sum("tenant_sessions", **at) == 1
        assert grew("forward_seconds_count", **at) >= stats.target_forwards
        assert grew("batch_rows_sum", **at) >= 60
        assert during.sum("sessions", **at, state="served") == 1
        assert during.sum("kv_cache_usage_ratio", **at) > 0
        assert sum(grew("spec_decode_num_draft_tokens_total", **at, kind=k.name.lower()) for k in SourceKind) > 0
        assert after.sum("proposals_total", **at) > 0
        assert grew("drafted_tokens_total", service="drafter") >= after.sum("proposed_tokens_total", service="drafter")
        assert after.sum("proposed_tokens_total") > 0

        for sample, value in during.values.items():
            if during.type_of(sample[0]) in ("counter", "histogram part"):
                assert after.values[sample] >= value, sample  # no count ever falls

        assert documented() == set(during.types)

        for where, expression in (*dashboard(), *alerts()):
            check(where, expression, during)


def check(where: str, expression: str, figures: Figures) -> None:
    names = list(selected(expression))
    assert names or expression.startswith("up{"), where
    for each in names:
        kind = figures.type_of(each.name)
        assert kind is not None, f"{where}: nobody has {each.name}"
        assert each.ranged == (kind in ("counter", "histogram part")), f"{where}: {each.name} is a {kind}"
        known = figures.labels(each.name)
        if known:  # what has not happened has no samples yet
            assert each.matched.keys() <= known, f"{where}: {each.name} has {known}, not all of {each.matched}"
        service = each.matched.get("service")
        if known and service:
            figures.sum(each.name, service=service)
    all_known = [figures.labels(each.name) for each in names]
    if all(all_known):
        assert grouped(expression) <= ADDED.union(*all_known), where


def documented() -> set[str]:
    """The names in the first column of the table of figures."""
    table = (FOLDER.parents[1] / "docs" / "OPERATIONS.md").read_text().partition("| figure")[2].partition("\n\n")[0]
    rows = [row.split("|")[1] for row in table.splitlines()[2:]]
    return {name for row in rows for name in re.findall(r"`((?:vllm:)?[a-z0-9_]+)`", row)}


def dashboard() -> Iterator[tuple[str, str]]:
    panels: list[dict[str, Any]] = json.loads((FOLDER / "dashboard.json").read_text())["panels"]
    for panel in panels:
        for target in panel.get("targets", ()):
            yield panel["title"], target["expr"]


def alerts() -> Iterator[tuple[str, str]]:
    for group in yaml.safe_load((FOLDER / "alerts.yml").read_text())["groups"]:
        for rule in group["rules"]:
            assert rule["labels"]["severity"] in ("warning", "critical")
            assert rule["annotations"]["summary"]
            yield rule["alert"], rule["expr"]


def test_panels_do_not_overlap_and_ids_differ() -> None:
    panels = json.loads((FOLDER / "dashboard.json").read_text())["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    taken: set[tuple[int, int]] = set()
    for place in (panel["gridPos"] for panel in panels):
        cells = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert not cells & taken
        assert max(x for x, _ in cells) < 24
        taken |= cells


def test_the_scrape_example_reads_where_up_listens() -> None:
    config = yaml.safe_load((FOLDER / "prometheus.yml").read_text())
    assert config["rule_files"] == ["alerts.yml"]
    (first, *others) = config["scrape_configs"][0]["static_configs"][0]["targets"]
    services = StackOptions("scripted:7", "scripted:8", metrics=first).services()
    assert [options.metrics for options in services.values()] == others


@pytest.mark.parametrize(
    "expression",
    [
        "sum(specwire:a_total",
        "rat(specwire:a_total[5m])",
        "rate(specwire:a_total)",
        "specwire:a{b}",
        "rate(specwire:a[5])",
    ],
)
def test_the_check_finds_mistakes(expression: str) -> None:
    with pytest.raises(ValueError):
        list(selected(expression))
