"""What a target is asked, to learn what it answers: given prompts, turns of its own making, and docstrings.

A model that was taught on chats also says what a user would, behind the header of a user's turn (Xu et al. 2024,
Magpie, arXiv 2406.08464); half of these turns are begun for it (OPENINGS), since by itself it asks for little but
stories and code. Docstrings and descriptions of the packages that are installed here, where their licences are
permissive, make requests for code, questions, and long passages to sum up or to answer from. Nothing that is asked or
learnt shares a run of APART tokens with the texts that it is to be measured by.
"""

from __future__ import annotations

import ast
import json
import sysconfig
from collections.abc import Iterable, Iterator, Sequence
from importlib.metadata import Distribution, distributions
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerFast

from specwire.core.model import ModelError
from specwire.lm.model_files import ModelText

APART = 13
PERMISSIVE = ("apache", "bsd", "mit", "isc", "python software foundation", "psf")
# Characters of a docstring and of a passage, and tokens of a prompt.
DOCSTRING, PASSAGE, PROMPT = range(40, 1400), range(400, 3000), range(12, 1024)
# Shares of what is asked: turns of its own making, plain text of a function's head, requests for code, questions; else
# what a passage says.
TURN, PLAIN, CODE, QUESTION = 0.60, 0.06, 0.12, 0.10
# Tokens of a turn of its own making, and the share of turns that are begun for it.
TURN_TOKENS, OPENED = range(4, 128), 0.6
# Passages that a question is answered from; files whose docstrings are read, to one package's description; a passage's
# paragraphs have so many characters at least, and this share of them is letters or blanks.
MOST_PASSAGES, FILES_A_PACKAGE, SENTENCE, PROSE = 4, 20, 80, 0.95
# Of a turn's characters: so many are ASCII, letters or blanks, and so many of its tokens differ.
ASCII, LETTERS, DIFFERENT = 0.9, 0.6, 0.4
# Characters by which turns are known to be the same.
SAME = 60
MARK = "\u2063what is asked\u2063"
REQUESTS = (
    "Complete this Python function:\n```python\n{head}\n```",
    "Write a Python function `{name}` that does the following: {first}",
    "Implement this function in Python.\n\n{head}",
    "{first}\nWrite Python code for this.",
    "Write a function in Python with this signature and docstring:\n\n{head}",
    "Please complete the following code:\n\n{head}",
)
QUESTIONS = (
    "Summarize: {whole}",
    "Summarize the following text in one or two sentences:\n\n{whole}",
    "Explain the following in simple words: {first}",
    "{whole}\n\nWhat is this about?",
    "Translate to German: {first}",
    "Rewrite this text so that it is easier to read:\n{whole}",
    "Answer the question from the context.\nContext: {whole}\nQuestion: What does {name} do?",
    "What is {first}",
    "Give an example of how one would use {name}. It is described so: {first}",
)
# How turns of its own making begin.
OPENINGS = (
    *("Translate German to English: ", "Translate French to English: ", "Translate English to Spanish: "),
    *("A farmer has ", "If a train ", "Tom buys ", "In a class of ", "Every day, Anna ", "A shop sells ", "Solve "),
    *("How many ", "How much ", "What is ", "Who ", "When did ", "Where ", "Why ", "Which ", "Name ", "What does "),
    *("Explain ", "Describe ", "Compare ", "Discuss ", "Define ", "Outline ", "Analyze ", "What are the effects of "),
    *("Write an email ", "Write a poem ", "Write a short story ", "Write a speech ", "Write a blog post ", "Draft "),
    *("Imagine ", "Pretend ", "You are ", "Act as ", "Suppose ", "Give me ", "List ", "Suggest ", "Plan "),
    *("Given the following ", "Extract ", "Classify ", "Rewrite ", "Correct ", "Evaluate ", "Summarize: ", "Format "),
    *("Write a function ", "Write a SQL ", "Implement ", "Write a regular expression ", "Fix the bug: ", "Prove "),
)
SUMMARIES = (
    "Summarize: {passage}",
    "Summarize the following article in a few sentences.\n\n{passage}",
    "{passage}\n\nSum this up in one paragraph.",
    "What are the main points of this text?\n\n{passage}",
    "Write a summary of the text below.\n\n{passage}",
)
ABOUT_PASSAGES = (
    "Answer the question from the context.\nContext: {passage}\n\nQuestion: What is said about {word}?",
    "{passage}\n\nBy these passages, what is {word}?",
    "Use the following passages to answer: how does {word} work?\n\n{passage}",
    "Question: Why does one need {word}?\n\nPassages:\n{passage}\n\nAnswer:",
)


class Frame(NamedTuple):
    """What stands before and behind a user's turn, in tokens, and which tokens end a turn; empty without a template."""

    before: tuple[int, ...]
    behind: tuple[int, ...]
    ends: frozenset[int]


class TargetPrompt(NamedTuple):
    """ids: of the prompt, or of what stands before a turn that is still to be said. kind: see `Prompts.next`."""

    ids: list[int]
    complete: bool
    kind: str


class DescribedFunction(NamedTuple):
    """A function of a package: its head with the docstring, and the docstring."""

    name: str
    head: str
    whole: str

    @property
    def first(self) -> str:
        """The first paragraph, in one line."""
        return " ".join(self.whole.strip().split("\n\n")[0].split())


class Prompts:
    """Requests, each of them once."""

    def __init__(
        self, text: ModelText, ends: Iterable[int], apart: Sequence[str], seed: int, given: Sequence[str] = ()
    ) -> None:
        """ends: ids that end a text. apart: texts to measure by. given: what is asked first. Raises ModelError."""
        if not text.tokenizer_json:
            raise ModelError("target: has no tokenizer, so it cannot be asked anything")
        self._tokenizer = Tokenizer.from_str(text.tokenizer_json.decode())
        self.frame = _frame(text, self._tokenizer, frozenset(ends))
        self._random, self._functions = Random(seed), described_functions(Random(seed))
        self._passages = passages(Random(seed))
        self._apart = {run for each in apart for run in _runs(self.encoded(each))}
        self._asked: set[str] = set()
        self._given = [*given]
        self._random.shuffle(self._given)

    def encoded(self, text: str) -> list[int]:
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False).ids
        return ids

    def next(self) -> TargetPrompt:
        """What is "given"; then a "turn" that is still to be said, or a whole request: of "plain" text, for "code", a
        "question", or of a "passage".
        """
        while self._given:
            ids = [*self.frame.before, *self.encoded(self._given.pop()), *self.frame.behind]
            if len(ids) < PROMPT.stop and self.new(ids, "given"):
                return TargetPrompt(ids, True, "given")
        while True:
            kind = self._kind()
            if kind == "turn":
                opening = self._random.choice(OPENINGS) if self._random.random() < OPENED else ""
                return TargetPrompt([*self.frame.before, *self.encoded(opening.rstrip())], False, kind)
            if kind == "plain":
                ids = self.encoded(next(self._functions).head)
            else:
                ids = [*self.frame.before, *self.encoded(self._request(kind)), *self.frame.behind]
            if len(ids) in PROMPT and self.new(ids, kind):
                return TargetPrompt(ids, True, kind)

    def _kind(self) -> str:
        if not self.frame.behind:
            return "plain"
        kinds = {"turn": TURN, "plain": PLAIN, "code": CODE, "question": QUESTION}
        (kind,) = self._random.choices([*kinds, "passage"], [*kinds.values(), 1 - sum(kinds.values())])
        return kind

    def _request(self, kind: str) -> str:
        if kind != "passage":
            function = next(self._functions)
            forms = REQUESTS if kind == "code" else QUESTIONS
            return self._random.choice(forms).format(**function._asdict(), first=function.first)
        if self._random.random() < 0.5:
            return self._random.choice(SUMMARIES).format(passage=next(self._passages))
        some = [next(self._passages)[: PASSAGE.stop // 3] for _ in range(self._random.randint(2, MOST_PASSAGES))]
        word = max(self._random.choice(some).split(), key=lambda each: (each.isalpha(), len(each)))
        return self._random.choice(ABOUT_PASSAGES).format(passage="\n\n".join(some), word=word)

    def sane(self, turn: Sequence[int]) -> bool:
        """Whether a turn that was said is one that a user could say, and was not said before."""
        text = self._tokenizer.decode([*turn], skip_special_tokens=False)
        if len(turn) not in TURN_TOKENS or len(set(turn)) < DIFFERENT * len(turn) or "<|" in text or "\ufffd" in text:
            return False
        ascii_, letters = (sum(map(test, text)) for test in (str.isascii, _is_letter))
        return ascii_ >= ASCII * len(text) and letters >= LETTERS * len(text) and self.new(turn, "turn")

    def new(self, ids: Sequence[int], kind: str) -> bool:
        """Whether it is apart from what is measured by, and was not asked before; of a turn its beginning tells.

        ids: with or without what stands before and behind every turn, which says nothing.
        """
        before, behind = self.frame.before, self.frame.behind
        if behind and tuple(ids[: len(before)]) == before and tuple(ids[-len(behind) :]) == behind:
            ids = ids[len(before) : -len(behind)]
        told = " ".join(self._tokenizer.decode([*ids]).lower().split())
        key = told[:SAME] if kind == "turn" else told
        if key in self._asked or not self.is_apart(ids):
            return False
        self._asked.add(key)
        return True

    def is_apart(self, ids: Sequence[int]) -> bool:
        return self._apart.isdisjoint(_runs(ids))


def texts_of(paths: Iterable[Path], option: str) -> Iterator[str]:
    """Of a .jsonl file each line's "turns", "prompt", "question" or "text"; of any other file all of it.

    Raises:
        ModelError: names the file that cannot be read, and the option that named it.
    """
    for path in paths:
        try:
            whole = path.read_text(encoding="utf-8")
            if path.suffix != ".jsonl":
                yield whole
                continue
            for line in filter(str.strip, whole.split("\n")):
                told = json.loads(line)
                turns = told.get("turns") or [told[key] for key in ("prompt", "question", "text") if key in told]
                if not isinstance(turns, list) or not all(isinstance(turn, str) for turn in turns):
                    raise ValueError(f"{line[:60]}: turns must be a list of strings, any other field a string")
                yield from turns
        except (OSError, ValueError, AttributeError) as error:
            raise ModelError(f"{option}: {path}: cannot be read: {error}") from error


def described_functions(random: Random) -> Iterator[DescribedFunction]:
    """Functions of installed packages that are permissively licensed, again and again, a file at a time."""
    files = sorted(_sources())
    if not files:
        raise ModelError("prompts: no Python source is installed that requests could be made of")
    while True:
        random.shuffle(files)
        for path in files:
            yield from functions_of(path)


def passages(random: Random) -> Iterator[str]:
    """Prose of long docstrings, and of what packages say of themselves, again and again."""
    files, packages = sorted(_sources()), [each for each in distributions() if _permissive(each)]
    while True:
        random.shuffle(files)
        for number, path in enumerate(files):
            if number % FILES_A_PACKAGE == 0 and packages:
                yield from parts_of(_description(random.choice(packages)))
            for docstring in docstrings_of(path):
                yield from parts_of(docstring)


def parts_of(text: str) -> Iterator[str]:
    """Paragraphs of prose one behind the other, as long as a passage is."""
    part = ""
    for paragraph in filter(_is_prose, (" ".join(each.split()) for each in text.split("\n\n"))):
        if len(part) + len(paragraph) + 2 >= PASSAGE.stop:
            yield part
            part = ""
        part = f"{part}\n\n{paragraph}".strip()
    if len(part) in PASSAGE:
        yield part


def docstrings_of(path: Path) -> Iterator[str]:
    """Those of a file's modules, classes and functions."""
    for node in ast.walk(_parsed(path)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef):
            yield ast.get_docstring(node) or ""


def functions_of(path: Path) -> Iterator[DescribedFunction]:
    """Those with a docstring, of a file that can be read."""
    tree = _parsed(path)
    lines = path.read_text(encoding="utf-8").split("\n") if tree.body else []
    for node in ast.walk(tree):
        if not isinstance(node, ast.FunctionDef) or node.name.startswith("__"):
            continue
        whole = ast.get_docstring(node)
        if whole and len(whole) in DOCSTRING:
            head = lines[node.lineno - 1 : node.body[0].end_lineno]
            yield DescribedFunction(node.name, "\n".join(line[node.col_offset :] for line in head) + "\n", whole)


def _parsed(path: Path) -> ast.Module:
    """Empty where it cannot be read."""
    try:
        return ast.parse(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, SyntaxError, RecursionError, MemoryError):
        return ast.Module([], [])


def _description(package: Distribution) -> str:
    """What a package says of itself at length."""
    told: Any = package.metadata
    return str(told.get_payload() or told.get("Description") or "")


def _sources() -> set[Path]:
    """Of the standard library, and of packages whose licence is known to be permissive; no tests."""
    own = Path(sysconfig.get_paths()["stdlib"])
    found = {path for path in own.rglob("*.py") if "site-packages" not in path.parts}
    for package in distributions():
        if _permissive(package):
            named = (file for file in package.files or () if file.suffix == ".py")
            found |= {Path(str(file.locate())) for file in named}
    return {path for path in found if not any(part.startswith("test") for part in path.parts)}


def _permissive(package: Distribution) -> bool:
    told: Any = package.metadata
    licences = [told.get("License-Expression"), told.get("License"), *(told.get_all("Classifier") or ())]
    stated = " ".join(each[:200].lower() for each in licences if each and ("License" in each or each in licences[:2]))
    return any(name in stated for name in PERMISSIVE) and "gpl" not in stated


def _frame(text: ModelText, tokenizer: Tokenizer, ends: frozenset[int]) -> Frame:
    """By the chat template."""
    if not text.chat_template:
        return Frame((), (), ends)
    speaker: Any = PreTrainedTokenizerFast(tokenizer_object=tokenizer, **text.special_tokens)
    try:
        rendered = speaker.apply_chat_template(
            [{"role": "user", "content": MARK}],
            chat_template=text.chat_template,
            tokenize=False,
            add_generation_prompt=True,
        )
    except Exception as error:  # whatever a template raises
        raise ModelError(f"target: its chat template cannot be rendered: {error}") from error
    before, found, behind = str(rendered).partition(MARK)
    if not found:
        raise ModelError("target: its chat template says nothing of what a user says")
    opening, closing = (tuple(tokenizer.encode(part, add_special_tokens=False).ids) for part in (before, behind))
    return Frame(opening, closing, ends | {*closing[:1]})


def _runs(ids: Sequence[int]) -> Iterator[tuple[int, ...]]:
    return (tuple(ids[first : first + APART]) for first in range(len(ids) - APART + 1))


def _is_prose(paragraph: str) -> bool:
    """Whether it is sentences, not a list, a table, markup or code."""
    letters = sum(map(_is_letter, paragraph))
    return len(paragraph) >= SENTENCE and letters >= PROSE * len(paragraph) and paragraph[-1] in ".?!"


def _is_letter(character: str) -> bool:
    return character.isalpha() or character == " "
