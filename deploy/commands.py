"""The commands of `specwire`, and what carries each one out."""

from __future__ import annotations

import argparse
import importlib
from dataclasses import dataclass
from typing import Protocol, cast


class Module(Protocol):
    """What a command's module offers, or an object in one."""

    def add_arguments(self, parser: argparse.ArgumentParser) -> None: ...

    def run(self, args: argparse.Namespace) -> int: ...


@dataclass(frozen=True, slots=True)
class Command:
    """A command.

    module: its `Module`, or "module:name" of one. configurable: its options may also come from a file and the
    environment (`deploy.settings`).
    """

    name: str
    help: str
    module: str
    configurable: bool = False

    def load(self) -> Module:
        """Import what it takes."""
        module, _, name = self.module.partition(":")
        found = importlib.import_module(module)
        return cast(Module, getattr(found, name) if name else found)


COMMANDS = (
    Command("up", "start the whole stack on this machine", "deploy.cli.services.up", configurable=True),
    Command("generate", "complete a prompt", "deploy.cli.clients.generate"),
    Command("chat", "talk with a model", "deploy.cli.clients.chat"),
    Command("demo", "watch drafting speed up real completions", "deploy.cli.clients.demo"),
    Command("draft", "serve a draft model", "draft_service.server", configurable=True),
    Command("verify", "serve a target model", "verify_service.server", configurable=True),
    Command("edge", "draft and serve clients here, verify elsewhere", "deploy.cli.services.edge", configurable=True),
    Command(
        "orchestrate", "serve clients with verifiers and drafters that run", "orchestrator.server", configurable=True
    ),
    Command("registry", "tell edges which verifiers are there", "deploy.cli.services.registry", configurable=True),
    Command("deploy", "run pools of services on a Ray cluster, as a file says", "deploy.cluster.commands:DEPLOY"),
    Command("status", "show what is deployed on a Ray cluster", "deploy.cluster.commands:STATUS"),
    Command("scale", "give a pool on a Ray cluster another number of replicas", "deploy.cluster.commands:SCALE"),
    Command("undeploy", "drain and end what is deployed on a Ray cluster", "deploy.cluster.commands:UNDEPLOY"),
    Command("simulate", "say what a setting would do, in virtual time", "deploy.cli.diagnosis.simulate"),
    Command("train-heads", "train a head that drafts beside a target", "deploy.cli.training.train_heads"),
    Command("train-drafter", "train a small drafter of a target's own layers", "deploy.cli.training.train_drafter"),
    Command("usage", "add up what a verifier's sessions used", "deploy.cli.diagnosis.usage"),
    Command("top", "show an orchestrator's services and sessions", "deploy.cli.diagnosis.top"),
    Command("doctor", "check this machine, a pair of models, a log, an address", "deploy.cli.diagnosis.doctor"),
    Command("completion", "print what has a shell complete these commands", "deploy.cli.completion"),
)
CONFIGURABLE = {command.name: command for command in COMMANDS if command.configurable}
