"""How families of models write calls of functions, and what a chat template tells of its model's family."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from specwire.text.tool_calls.readers import (
    CALL_END,
    DSML,
    GLM45,
    GLM47,
    QWEN,
    CallReader,
    Functions,
    JsonCall,
    NamedCall,
    PythonCall,
    XmlCall,
    XmlTags,
)

Json = Mapping[str, Any]

# ----------------------------------------------------------------------------------------------------------------------
# How one call is written.


@dataclass(frozen=True, slots=True)
class JsonStyle:
    """An object with the function's name and its arguments. arguments: the key of those. end: what follows it."""

    arguments: str = "arguments"
    end: str = ""

    def reader(self, functions: Functions) -> CallReader:
        return JsonCall(functions)

    def head(self, name: str) -> str:
        """What stands before the arguments."""
        return f'{{"name": {json.dumps(name)}, "{self.arguments}": '

    @property
    def tail(self) -> str:
        """What stands behind them."""
        return "}" + self.end

    def written(self, name: str, arguments: Json) -> str:
        return self.head(name) + json.dumps(arguments, ensure_ascii=False) + self.tail


@dataclass(frozen=True, slots=True)
class NamedStyle:
    """The function's name, then an object. befores, between, marked, numbered: as of `NamedCall`.

    The first of `befores` is written, and the number 0.
    """

    befores: tuple[str, ...] = ("",)
    between: str = ""
    tail: str = ""
    marked: bool = False
    numbered: bool = False

    def reader(self, functions: Functions) -> CallReader:
        return NamedCall(functions, self.befores, self.between, self.marked, self.numbered)

    def head(self, name: str) -> str:
        return self.befores[0] + name + self.between

    def written(self, name: str, arguments: Json) -> str:
        return self.head(name) + json.dumps(arguments, ensure_ascii=False) + self.tail


# Mistral's since 2025; models from before that are read so, too.
MARKED = NamedStyle(marked=True)


@dataclass(frozen=True, slots=True)
class XmlStyle:
    """See `XmlCall`. What cannot be written so is written as JSON, which is read, too."""

    tags: XmlTags
    as_json: JsonStyle = JsonStyle()
    keys = re.compile(r'[^<>"\s]{1,64}')

    def reader(self, functions: Functions) -> CallReader:
        return XmlCall(functions, self.tags)

    def written(self, name: str, arguments: Json) -> str:
        tags = self.tags
        values = {
            key: (tags.text, value) if isinstance(value, str) else (tags.json, json.dumps(value, ensure_ascii=False))
            for key, value in arguments.items()
        }
        if not all(map(self.keys.fullmatch, values)) or any(tags.marks.search(text) for _, text in values.values()):
            return self.as_json.written(name, arguments)
        parts = [f"{tags.key}{key}{before}{text}{tags.value_end}" for key, (before, text) in values.items()]
        return f"{tags.function}{name}{tags.named}{''.join(parts)}{tags.end}"


@dataclass(frozen=True, slots=True)
class PythonStyle:
    """See `PythonCall`. What cannot be written so is written as JSON, which is read, too."""

    keys = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,63}")

    def reader(self, functions: Functions) -> CallReader:
        return PythonCall(functions)

    def written(self, name: str, arguments: Json) -> str:
        if not all(map(self.keys.fullmatch, arguments)):
            return JsonStyle().written(name, arguments)
        pairs = [f"{key}={json.dumps(value, ensure_ascii=False)}" for key, value in arguments.items()]
        return f"{name}({', '.join(pairs)})"


CallStyle = JsonStyle | NamedStyle | XmlStyle | PythonStyle

# ----------------------------------------------------------------------------------------------------------------------
# A text with calls.


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """How a family writes calls. Each of them may also be a JSON object.

    Attributes:
        opener: before each call, or before all of them; "": none. One that is a special token may lack in a text, as
            detokenisers leave those out: such formats lead, too.
        start: begins a call wherever it stands, without an opener; "": nothing does.
        closers: what may follow a call; the last one ends all of them.
        leads: with these characters a text may begin with a call, or a list of them, without an opener.
        named: so it may with a function's name.
        chained: further calls need no opener.
        before, between, behind: as the family writes several.
        ids: of calls as the family writes them, where a template shows them to the model; "" for any.
    """

    name: str
    style: CallStyle
    opener: str = ""
    start: str = ""
    closers: tuple[str, ...] = ()
    leads: str = ""
    named: bool = False
    chained: bool = False
    before: str = ""
    between: str = ""
    behind: str = ""
    ids: str = ""

    def reader(self, first: str, functions: Functions) -> CallReader:
        """first: the call's first character."""
        if first == "{":
            return JsonCall(functions)
        return (MARKED if self.named else self.style).reader(functions)

    def written(self, calls: Sequence[tuple[str, Json]]) -> str:
        """Calls, each as name and arguments, as a text has them."""
        return self.before + self.between.join(self.style.written(*call) for call in calls) + self.behind


LISTED: Mapping[str, Any] = {"leads": "{[", "chained": True, "before": "[", "between": ", ", "behind": "]"}
TAGGED: Mapping[str, Any] = {
    "opener": "<tool_call>",
    "closers": ("</tool_call>",),
    "before": "<tool_call>\n",
    "between": "\n</tool_call>\n<tool_call>\n",
    "behind": "\n</tool_call>",
}
CALLS, CALLS_END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
CALL, SEPARATOR = "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>"
DEEPSEEK_END = "<｜tool▁call▁end｜>"
DEEPSEEK: Mapping[str, Any] = {"opener": CALLS, "start": CALL, "chained": True, "before": CALLS, "behind": CALLS_END}
FENCE, FENCE_END = "\n```json\n", "\n```"
KIMI, KIMI_END = "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"
KIMI_CALL, KIMI_ARGUMENTS, KIMI_CALL_END = "<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>"
IN_PLACE: Mapping[str, Any] = {**TAGGED, "between": "\n<tool_call>", "before": "<tool_call>", "behind": ""}
AS_JSON = JsonStyle(end=f"\n{CALL_END}")


def _dsml(name: str, wrapper: str) -> ToolFormat:
    opener, closer = f"<｜DSML｜{wrapper}>", f"</｜DSML｜{wrapper}>"
    return ToolFormat(
        name,
        XmlStyle(DSML, JsonStyle(end="\n")),
        opener=opener,
        start=DSML.function,
        closers=(closer,),
        chained=True,
        before=f"{opener}\n",
        behind=closer,
    )


FORMATS = {
    each.name: each
    for each in (
        ToolFormat("hermes", JsonStyle(), **TAGGED),
        ToolFormat("qwen3_coder", XmlStyle(QWEN), start=QWEN.function, **TAGGED),
        ToolFormat("glm45", XmlStyle(GLM45, AS_JSON), **IN_PLACE),
        ToolFormat("glm47", XmlStyle(GLM47, AS_JSON), **IN_PLACE),
        ToolFormat("llama3", JsonStyle("parameters"), opener="<|python_tag|>", leads="{[", chained=True, between="; "),
        ToolFormat(
            "pythonic",
            PythonStyle(),
            opener="<|python_start|>",
            closers=("<|python_end|>",),
            leads="[",
            before="[",
            between=", ",
            behind="]",
        ),
        ToolFormat("mistral", JsonStyle(), opener="[TOOL_CALLS]", named=True, **LISTED),
        ToolFormat("mistral_args", MARKED, opener="[TOOL_CALLS]", leads="{[", named=True, chained=True),
        ToolFormat(
            "deepseek_v3",
            NamedStyle((f"{CALL}function{SEPARATOR}",), FENCE, FENCE_END + DEEPSEEK_END),
            closers=(FENCE_END.strip() + DEEPSEEK_END, CALLS_END),
            between="\n",
            **DEEPSEEK,
        ),
        ToolFormat(
            "deepseek_v31", NamedStyle((CALL,), SEPARATOR, DEEPSEEK_END), closers=(DEEPSEEK_END, CALLS_END), **DEEPSEEK
        ),
        _dsml("deepseek_v32", "function_calls"),
        _dsml("deepseek_v4", "tool_calls"),
        ToolFormat(
            "kimi_k2",
            NamedStyle((f"{KIMI_CALL}functions.", KIMI_CALL), f":0{KIMI_ARGUMENTS}", KIMI_CALL_END, numbered=True),
            opener=KIMI,
            start=KIMI_CALL,
            closers=(KIMI_CALL_END, KIMI_END),
            chained=True,
            before=KIMI,
            behind=KIMI_END,
            ids="functions.{name}:{number}",
        ),
        ToolFormat("json", JsonStyle(), **LISTED),
    )
}
# What only the templates of one family say, in the order in which it is looked for.
SIGNS = (
    ("qwen3_coder", (QWEN.function,)),
    ("glm47", ("</arg_key><arg_value>",)),
    ("glm45", ("<arg_key>",)),
    ("hermes", ("<tool_call>",)),
    ("mistral_args", ("[ARGS]",)),
    ("mistral", ("[TOOL_CALLS]",)),
    ("deepseek_v3", (CALL, "```json")),
    ("deepseek_v31", (CALL,)),
    ("deepseek_v4", ("｜DSML｜tool_calls",)),
    ("deepseek_v32", ("｜DSML｜",)),
    ("kimi_k2", (KIMI_CALL,)),
    ("pythonic", ("[func_name1(",)),
    ("llama3", ("<|start_header_id|>",)),
    ("llama3", ("<|header_start|>",)),
)
THINK, THOUGHT = "<think>", "</think>"
# A template that writes a call's arguments as they are, and so wants them as text.
AS_TEXT = re.compile(r"\+ *\w+\['function'\]\['arguments'\] *\+")


@dataclass(frozen=True, slots=True)
class ChatFamily:
    """What a chat template tells of its model.

    tells: it writes tools into the prompt by itself. thinks: the model may write its reasoning first. as_text: it wants
    the arguments of calls as text, not as objects.
    """

    format: ToolFormat
    tells: bool
    thinks: bool
    as_text: bool = False

    @classmethod
    def of(cls, template: str, named: str = "") -> ChatFamily:
        """named: of `FORMATS`; "": as the template says, else "json"."""
        signed = (name for name, signs in SIGNS if all(sign in template for sign in signs))
        found = named or next(signed, "json")
        tells = re.search(r"\btools\b", template) is not None
        thinks = THINK in template or THOUGHT in template
        return cls(FORMATS[found], tells, thinks, AS_TEXT.search(template) is not None)
