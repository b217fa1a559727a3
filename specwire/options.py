"""The one table of options of what serves: each option once, with its type, its default, its help and who takes it.

A command takes its rows (`add_options`). From the parser come the names in the YAML file and the environment
(`deploy.settings`) and the reference of `make docs`; `words_of` writes the words that one process starts another with.
A wrong value is refused in the same words wherever it stands.

It is a dataclass of ours, since to import pydantic takes 150 ms, and machines that only serve do not have it.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import KW_ONLY, dataclass, field, replace
from pathlib import Path
from typing import Any

from specwire.core.model import AUTO, AUTO_KV, ENGINES, KV_TYPES, NONE, QUANTIZATIONS, RANKS, RUNTIMES, SPECWIRE, STAGES
from specwire.rpc.keys import TOKEN_VARIABLE
from specwire.rpc.model_info import core_numbers
from specwire.rpc.process import DRAIN_GRACE
from specwire.rpc.server_options import ANY_PORT, SERVED_DTYPES, TEXT_MEMORY
from specwire.telemetry import logs
from specwire.telemetry.options import inherited
from specwire.text.tool_calls.formats import FORMATS

# ----------------------------------------------------------------------------------------------------------------------
# A row of the table.


def whole(text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"must be a whole number, not {text!r}") from None


def number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"must be a number, not {text!r}") from None


TYPES: dict[Any, Callable[[str], Any]] = {int: whole, float: number}


@dataclass(frozen=True, slots=True)
class Option:
    """`--name`, which the commands in `of` take.

    kind: bool is a flag; with the default True it has a --no-name, too. default: or a function that computes it.
    several: it may be repeated. alone: at most one option with the same word may be given. dest: its name as an
    attribute, where that differs. positional: how many, as argparse has it. unlike: what is different of some commands.
    """

    name: str
    of: str
    metavar: str | None = None
    kind: Any = str
    default: Any = None
    _: KW_ONLY
    help: str
    choices: tuple[str, ...] = ()
    several: bool = False
    required: bool = False
    positional: str | None = None
    alone: str = ""
    dest: str = ""
    unlike: Mapping[str, Any] = field(default_factory=dict)

    @property
    def attribute(self) -> str:
        return self.dest or self.name.replace("-", "_")

    @property
    def standard(self) -> Any:
        """The default; of what may be repeated a list of its own, if it has one."""
        value = self.default() if callable(self.default) else self.default
        if self.kind is bool:
            return bool(value)
        return list(value) if self.several and value is not None else value

    def chosen(self, text: str) -> str:
        if text not in self.choices:
            raise argparse.ArgumentTypeError(f"must be one of {', '.join(self.choices)}, not {text!r}")
        return text

    def add_to(self, place: argparse._ActionsContainer, words: Mapping[str, str]) -> None:
        """Let a parser take it. words: for what stands in braces in the help."""
        keys: dict[str, Any] = {"help": self.help, "default": self.standard}
        for word, meaning in words.items():
            keys["help"] = keys["help"].replace(f"{{{word}}}", meaning)
        if self.kind is bool:
            keys["action"] = argparse.BooleanOptionalAction if self.default else "store_true"
        else:
            keys |= {"metavar": self.metavar, "type": TYPES.get(self.kind, self.kind)}
        if self.choices:
            keys |= {"choices": self.choices, "type": self.chosen}
        if self.several:
            keys["action"] = "append"
        if self.positional is not None:
            place.add_argument(self.name, nargs=self.positional or None, **keys)
        else:
            place.add_argument(f"--{self.name}", dest=self.attribute, required=self.required, **keys)

    def words(self, value: Any) -> Iterator[str]:
        """The words of a command line that say `value`; none where it is what nobody has to say."""
        if value is None or value == self.standard:
            return
        if self.kind is bool:
            yield f"--{self.name}" if value else f"--no-{self.name}"
            return
        for each in value if self.several else [value]:
            yield f"--{self.name}={each}"


# ----------------------------------------------------------------------------------------------------------------------
# Defaults that other modules have, too.

DEFAULT_LISTEN, DEFAULT_HTTP = "127.0.0.1:50051", "127.0.0.1:8000"
# What --http says for no HTTP.
NO_HTTP = "none"
# Seconds for which an ended session can be watched again.
RETENTION_S = 3600.0
# Seconds: below what any proxy takes for a dead connection.
SSE_KEEP_ALIVE_S = 15.0
VERIFIER_WAIT_S, DETACH_GRACE_S = 30.0, 30.0
START_TIMEOUT_S, CLUSTER_START_S = 120.0, 600.0
# Sessions that wait for a slot, and how many seconds each does.
QUEUE, QUEUE_WAIT_S = 64, 30.0
SLOTS = 16
LEVELS = "memory, file, file-fsync, redis, redis-fsync, redis-wait:N"


def cores() -> int:
    """Return how many cores this process may use."""
    return len(core_numbers()) or os.cpu_count() or 1


# ----------------------------------------------------------------------------------------------------------------------
# Who takes what. `stack`: `up`, and what starts a stack of its own; `client`: who calls a running one; `proposer`: the
# drafter inside vLLM.

SERVING = "up verify draft edge orchestrate registry"
MODELS = "verify draft"
DOORS = "up edge orchestrate"
LOGS = "stack edge orchestrate"
DIALLING = "draft edge orchestrate proposer"
STACK = "stack"
CLUSTER = "deploy status scale undeploy"

# What stands in braces in a help, by command.
WORDS: dict[str, dict[str, str]] = {
    STACK: {"heads": "auto; `demo` takes the demo pair's, if the target is"},
    "up": {"callers": "clients", "http": f"{DEFAULT_HTTP}, or any free port where --listen takes one"},
    "verify": {"callers": "orchestrators", "found": "orchestrators look for it", "heads": "none"},
    "draft": {
        "callers": "orchestrators",
        "found": "orchestrators look for it",
        "cloud": "orchestrators to dial in to",
        "peers": "the orchestrators of --connect and --cloud",
    },
    "edge": {
        "callers": "clients",
        "http": NO_HTTP,
        "found": "verifiers are found",
        "cloud": "verifiers",
        "peers": "verifiers",
        "weights": "of the draft model",
    },
    "orchestrate": {
        "callers": "clients",
        "http": NO_HTTP,
        "found": "verifiers and drafters are found, and clients find this orchestrator",
        "cloud": "verifiers",
        "peers": "verifiers and drafters",
    },
    "registry": {"callers": "edges and drafters"},
    "proposer": {"peers": "drafters", "found": "drafters are found"},
}

MANY = "HOST:PORT; may be repeated"
WEIGHTS = "of weights and arithmetic"
LISTEN_HELP = "HOST:PORT, port 0 takes a free one"
ADDRESS_OF = {
    "up": {"default": DEFAULT_LISTEN, "help": "HOST:PORT of the orchestrator (default: %(default)s)"},
    "edge": {"default": DEFAULT_LISTEN, "help": "HOST:PORT for clients (default: %(default)s)"},
}
LOG_OF = {
    "stack": {"default": None, "help": "session log: a Redis, or file:PATH (default: a private Redis)"},
    "edge": {"help": "session log: file:PATH, or a Redis (default: memory:, lost in a crash)"},
}
STARTED = {"default": CLUSTER_START_S, "help": "until what is started must be ready (default: %(default)g s)"}
HEADS = (
    "what drafts beside this target, where that pays: the folder of an EAGLE-3, Medusa or Hydra head trained for it, "
    "or of an MTP layer, mostly its own; self:skip=LAYER,... or self:exit=LAYER, itself without some layers; auto: the "
    "one included for it, if any (default: {heads})"
)

# Rows by the heading that they have in --help.
# fmt: off
TABLE: dict[str, tuple[Option, ...]] = {
    "": (
        Option("model", MODELS, "MODEL", positional="",
               help="path, hub id, GGUF file, a name of `make setup-models`, or scripted:SEED for known logits"),
        Option("target", STACK, "MODEL", help="path, hub id or named model (default: the demo pair's target)"),
        Option("draft", "stack edge", "MODEL", several=True, alone="draft",
               help="path or hub id (default: the demo pair's, if the target is); may be repeated",
               unlike={"edge": {"help": "path or hub id of the draft model", "several": False, "required": True,
                                "alone": ""}}),
        Option("no-draft", STACK, kind=bool, alone="draft",
               help="no drafter; with --no-ngram and --no-heads, the target alone"),
        Option("verifier", "edge orchestrate", "ADDR", several=True, default=(), help=MANY),
        Option("drafter", "orchestrate proposer", "ADDR", several=True, default=(), help=MANY),
        Option("listen", SERVING, "ADDR", default=ANY_PORT, help=LISTEN_HELP, unlike=ADDRESS_OF),
        Option("also", "up", "MODEL", several=True, default=(),
               help="serve this target, too, to requests that name it; may be repeated"),
        Option("redis-url", LOGS, "URL", default="memory:",
               help="session log: a Redis, or file:PATH (default: memory:, lost with the process)",
               unlike=LOG_OF),
        Option("start-timeout", "edge orchestrate deploy scale", "S", float, START_TIMEOUT_S,
               help="wait for a verifier at start",
               unlike={"edge": {"help": "wait for a verifier (default: %(default)s s)"},
                       **dict.fromkeys(("deploy", "scale"), STARTED)}),
        Option("plan", "stack orchestrate proposer", "PLAN", default="auto",
               help="auto[:BRANCHES], off, lockstep:K or stream:CHUNK,RUN_AHEAD[,DUE[,BRANCHES]]"),
        Option("drafters-per-session", LOGS, "N", int, 1,
               help="drafters that propose for one session at a time (default: %(default)s)"),
        Option("dtype", "stack verify draft edge doctor", default=AUTO, choices=SERVED_DTYPES,
               help="{weights}; auto: bfloat16 where the device computes it itself, else float32 (default: "
                    "%(default)s)"),
        Option("device", "stack verify draft edge", default="cpu",
               help="such as cpu or cuda:0",
               unlike={"stack": {"help": "of both models, such as cpu or cuda:0 (default: %(default)s)"},
                       "edge": {"help": "of the draft model, such as cpu or cuda:0"}}),
        Option("draft-device", STACK, "DEVICE", default="", help="of the drafters (default: the target's)"),
        Option("compile", "stack verify draft", kind=bool, dest="compiled",
               help="compile the forwards in static shapes: for GPUs, minutes at start"),
        Option("runtime", "stack verify draft edge", default=AUTO, choices=RUNTIMES,
               help="of forwards; openvino: on CPUs, with that extra installed; llamacpp: of GGUF files, with that "
                    "extra; auto: the quickest here that can (default: %(default)s)"),
        Option("quantization", "stack verify draft edge", default=NONE, choices=QUANTIZATIONS,
               help="with openvino alone; int8: round the weights of linear layers to 8 bits; int8-dynamic: and what "
                    "they multiply; bfloat16: keep weights in 16 bits, and compute in float32 (default: none, or what "
                    "is quickest for GGUF files of at most 8 bits)"),
        Option("kv-type", "stack verify draft edge", default=AUTO_KV, choices=KV_TYPES,
               help="of a GGUF file's keys and values (default: f16, or f32 where its weights are)"),
        Option("gpu-layers", "verify draft edge", "N", int, 0,
               help="of a GGUF file, that lie on a GPU, if llama.cpp was built for it (default: %(default)s)"),
        Option("threads", MODELS, "N", int, 1,
               help="CPU threads (default: %(default)s)",
               unlike={"verify": {"default": lambda: len(core_numbers()) or 1}}),
        Option("target-threads", STACK, "N", int,
               help="CPU threads (default: all cores; half of them for the included target)"),
        Option("draft-threads", "stack edge", "N", int, 1,
               help="CPU threads (default: %(default)s)",
               unlike={"edge": {"help": "CPU threads of the draft model (default: 1)"}}),
        Option("slots", "stack verify draft edge", "N", int, SLOTS, help="sessions at once (default: %(default)s)"),
        Option("kv-memory", "verify draft edge", "SIZE",
               help="of keys and values, a head's too, such as 8G: as many slots as fit, whatever --slots says"),
        Option("context", "verify draft edge", "N", int, help="positions per session (default: the model's)"),
        Option("deterministic", "stack verify", kind=bool,
               help="refuse to serve where guesses, or who shares a forward, could change a bit; slower on torch "
                    "and llama.cpp (default: off)"),
        Option("ngram", "verify", kind=bool, default=True,
               help="propose what followed the same tokens earlier in the text, where that pays (default: on)"),
        Option("no-ngram", "stack proposer", kind=bool,
               help="the verifier proposes nothing from the text itself (default: it does)",
               unlike={"proposer": {"help": "propose nothing from the text itself"}}),
        Option("text-memory", "stack verify", "SIZE", default=f"{TEXT_MEMORY >> 20}M",
               help="for texts of sessions, which others of their tenant are proposed; 64 bytes a token; 0 keeps "
                    "none; only where callers have --api-keys; as much again for references of requests (default: "
                    "%(default)s)"),
        Option("reference", "stack verify", "PATH", several=True, default=(),
               help="documents to propose from: a file, or a folder with source code and texts; may be repeated "
                    "(default: none)"),
        Option("heads", "stack verify", "HEAD", default="",
               help=HEADS, unlike={"stack": {"default": None, "alone": "heads"}}),
        Option("no-heads", STACK, kind=bool, alone="heads",
               help="nothing drafts beside the target, as with --heads ''"),
        Option("patient", "verify", kind=bool,
               help="wait for all due draft tokens: a baseline to measure, never faster"),
        Option("detach-grace", "verify", "S", float, DETACH_GRACE_S,
               help="keep a session for so long after its link was lost (default: %(default)g s)"),
        Option("queue", "verify", "N", int, QUEUE,
               help="sessions that may wait for a slot; more are refused (default: %(default)s)"),
        Option("queue-wait", "verify", "S", float, QUEUE_WAIT_S,
               help="refuse a session that has waited for so long (default: %(default)g s)"),
        Option(RANKS, "verify", "N", int, 1,
               help="with --engine vllm: split each layer over N processes, on GPUs one for each (default: "
                    "%(default)s)"),
        Option(STAGES, "verify", "N", int, 1,
               help="with --engine vllm: split the layers into N stages of --tensor-parallel-size each (default: "
                    "%(default)s)"),
        Option("engine", "verify", default=SPECWIRE, choices=ENGINES,
               help="what computes forwards: our own runtimes, or vLLM's worker where it is installed (default: "
                    "%(default)s)"),
        Option("engine-options", "verify", "JSON", default="{}",
               help="arguments of vLLM's EngineArgs, such as '{\"enforce_eager\": true}' (default: none)"),
        Option("tenants", "verify", "FILE",
               help="tenants by token or certificate share the verifier; their weights and limits, YAML "
                    "(docs/SECURITY.md)"),
        Option("usage-log", "verify", "FILE", Path,
               help="append what each session used, as lines of JSON that `specwire usage` adds up"),
        Option("connect", "draft", "ADDR", several=True,
               help="dial in to the orchestrator at HOST:PORT instead of listening (behind NAT); may be repeated"),
        Option("one-process", STACK, kind=bool,
               help="models, orchestrator and log in one process; the log is in memory unless --redis-url says where"),
        Option("unlisted", "up", kind=bool, help="keep generate, chat, top and doctor from finding this stack unasked"),
        Option("accept-drafters", "edge orchestrate", kind=bool, help="let drafters dial in; they read every prompt"),
        Option("drafter-name", "edge orchestrate", "NAME", several=True, default=(),
               help="only these may dial in: a name in the drafter's certificate; may be repeated"),
        Option("drafter-keys", "edge orchestrate", "FILE", help="drafters that dial in must show a token of this file"),
        Option("verifier-wait", "edge orchestrate", "S", float, VERIFIER_WAIT_S,
               help="how long a text waits for a verifier, which may have to load its model again (default: "
                    "%(default)g s)"),
        Option("insecure", SERVING, kind=bool, help="listen beyond loopback without encryption"),
        Option("api-keys", SERVING, "FILE", help="{callers} must show a token of FILE: NAME TOKEN lines"),
        Option("metrics", SERVING, "ADDR", default="",
               help="HOST:PORT for Prometheus, encrypted where the service is (default: nowhere)"),
        Option("grace", SERVING, "S", float, DRAIN_GRACE,
               help="on a signal, let what runs go on for so long (default: %(default)g s)"),
        Option("max-tokens-default", DOORS, "N", int, 0,
               help="tokens of an answer whose request says nothing (default: 16 for HTTP's completions, else what the"
                    " context holds)"),
        Option("max-tokens-limit", DOORS, "N", int, 0,
               help="most tokens of an answer; a request that names more is refused (default: what the context holds)"),
        Option("log-prompts", DOORS, kind=bool, help="log what is asked and answered, at level info (default: never)"),
        Option("file", "deploy", "CONFIG", positional="", help="YAML with pools and orchestrators (docs/DEPLOY.md)"),
        Option("wanted", "scale", "POOL=N", positional="+", help="replicas of a pool"),
        Option("ray-address", CLUSTER, "ADDR", default="auto",
               help="of the Ray cluster (default: the one of this machine)"),
        Option("namespace", CLUSTER, "NAME", default="specwire",
               help="Ray's, of this deployment (default: %(default)s)"),
        Option("drain-timeout", "deploy scale undeploy", "S", float,
               help="then what drains is killed (default: the longest grace in the file, and 30 s)"),
        Option("dry-run", "deploy undeploy", kind=bool, help="say what would change, and change nothing",
               unlike={"undeploy": {"help": "say what would go, and change nothing"}}),
        Option("json", f"{SERVING} status", kind=bool, help="print the ready line as one JSON object",
               unlike={"status": {"help": "print one JSON object instead of a table"}}),
    ),
    "session log": (
        Option("durability", LOGS, "LEVEL", default="",
               help=f"what an acknowledged token survives: {LEVELS} (default: memory, file or redis, as the URL says)"),
        Option("retention", LOGS, "S", float, RETENTION_S,
               help="keep prompt and text so long after a session's end (default: %(default)g s)"),
    ),
    "HTTP, as OpenAI's API is called (docs/HTTP.md)": (
        Option("http", DOORS, "ADDR", default=NO_HTTP,
               help="HOST:PORT, or none (default: {http})",
               unlike={"up": {"default": ""}}),
        Option("chat-template", DOORS, "FILE", help="Jinja template of chats (default: the model's, if it has one)"),
        Option("tool-format", DOORS, choices=tuple(sorted(FORMATS)),
               help="how the model writes calls of tools (default: as its chat template says)"),
        Option("sse-keep-alive", DOORS, "S", float, SSE_KEEP_ALIVE_S,
               help="a silent stream gets a comment so often, for proxies that cut what is silent (default: "
                    "%(default)g s)"),
        Option("http-host", DOORS, "NAME", several=True, default=(),
               help="answer to this name, too, in a request's Host, beside addresses, localhost and --http's own; may"
                    " be repeated; * answers to any"),
        Option("http-origin", DOORS, "ORIGIN", several=True, default=(),
               help="pages of this origin (SCHEME://HOST[:PORT]) may call and read (CORS), beside the console; may be"
                    " repeated; * lets in any"),
        Option("http-body", DOORS, "BYTES", int, 0,
               help="longest body of a request (default: 1 MiB and 64 for each token of the context, at most 16 MiB)"),
    ),
    "tenants: one for each name in --api-keys, else all callers together": (
        Option("tenant-sessions", DOORS, "N", int, help="sessions that a tenant may have at once"),
        Option("tenant-tokens", DOORS, "N", int, help="tokens that a tenant may have a minute, prompts included"),
        Option("tenant-log", DOORS, "SIZE",
               help="what the log may keep of a tenant's sessions, such as 1G; default: with --tenant-tokens 64 bytes"
                    " for each token within --retention, at least 64M"),
        Option("operator-keys", DOORS, "FILE",
               help="who shows a token of FILE may see what all tenants do: specwire top"),
        Option("rules", DOORS, "RULE,...",
               help="acceptance rules that requests may have (default: all; with --accept-drafters greedy,coupled, "
                    "under which no drafter can change a text)"),
        Option("cache-salt", DOORS, "FILE",
               help="holds a secret, like a token; a tenant's cache is shared between orchestrators with the same one"),
    ),
    "TLS of the address it listens on": (
        Option("tls-cert", SERVING, "FILE", help="the certificate chain, PEM"),
        Option("tls-key", SERVING, "FILE", help="its private key, PEM"),
        Option("tls-client-ca", SERVING, "FILE", help="clients must show a certificate of this authority"),
    ),
    "TLS to {peers}": (
        Option("tls", f"{DIALLING} client", kind=bool, help="encrypt, and trust the system's authorities"),
        Option("tls-ca", f"{DIALLING} client", "FILE", help="encrypt, and trust the authorities in FILE"),
        Option("tls-client-cert", f"{DIALLING} client", "FILE",
               help="show this certificate to a server that asks for one"),
        Option("tls-client-key", f"{DIALLING} client", "FILE", help="its private key"),
        # No option takes the token itself: every user of a machine sees command lines.
        Option("token-file", f"{DIALLING} client", "FILE",
               help="holds the token to show to {peers}",
               unlike={"client": {"help": f"holds the token to show to {{peers}} (default: ${TOKEN_VARIABLE})"}}),
    ),
    "registry (docs/DEPLOY.md)": (
        Option("registry", "verify draft edge orchestrate registry proposer", "URL", default="",
               help="Redis where {found} (default: none)",
               unlike={"registry": {"help": "Redis where services are registered", "default": None,
                                    "required": True}}),
        Option("advertise", "verify draft edge orchestrate", "ADDR", default="",
               help="HOST or HOST:PORT where others dial this service (default: where it listens)"),
        Option("region", "verify draft edge orchestrate", "NAME", default="",
               help="where it is; equal names are near (default: none)"),
    ),
    "cloud (docs/DEPLOY.md)": (
        Option("cloud", "draft edge orchestrate", "ADDR", default="",
               help="HOST:PORT of a `specwire registry` that tells {cloud} (default: none)"),
        Option("cloud-model", "draft edge orchestrate", "NAME", several=True, default=(),
               help="only what serves this target; may be repeated"),
    ),
    "traces and logs (docs/OPERATIONS.md)": (
        Option("traces", SERVING, "URL", default=lambda: inherited().traces,
               help="OpenTelemetry collector, OTLP over HTTP (default: none)"),
        Option("log-format", SERVING, default=lambda: inherited().log_format, choices=logs.FORMATS,
               help="of lines on stderr"),
        Option("log-level", SERVING, default=lambda: inherited().log_level, choices=logs.LEVELS,
               help="least that is logged"),
    ),
}
# fmt: on


def options_of(command: str) -> Iterator[tuple[str, Option]]:
    """What a command takes, each with its heading."""
    for heading, rows in TABLE.items():
        for row in rows:
            if command in row.of.split():
                yield heading, replace(row, **row.unlike.get(command, {}))


def add_options(parser: argparse.ArgumentParser, command: str, without: str = "", **words: str) -> None:
    """Let a parser take what `command` takes. words: as in WORDS. without: a name that is left to the caller."""
    said = {"weights": WEIGHTS, **WORDS.get(command, {}), **words}
    places: dict[str, argparse._ActionsContainer] = {}
    for heading, option in options_of(command):
        if option.name == without:
            continue
        title = (heading or (STACK if command == STACK else "")).replace("{peers}", said.get("peers", ""))
        if title not in places:
            places[title] = parser.add_argument_group(title) if title else parser
        place = places[title]
        if option.alone:
            if option.alone not in places:
                places[option.alone] = place.add_mutually_exclusive_group()
            place = places[option.alone]
        option.add_to(place, said)


def words_of(command: str, values: Mapping[str, Any]) -> list[str]:
    """The words that tell a process of `command` these values, by fields; what is said by nobody is its default."""
    return [word for _, option in options_of(command) for word in option.words(values.get(option.attribute))]
