"""Makes ``shipped.jsonl``, a small workload that shows every kind of reuse. Run it with its path to write it anew:

    python -m context_cache.coordinator.cli.workloads.generate coordinator/cli/workloads/shipped.jsonl

What is in it, interleaved as if many people used one server:

* chats of several turns behind shared system prompts; each turn repeats the chat so far and adds a question;
* documents, each with several questions about it;
* sorting jobs with one long instruction, which publish the state of the prompt only;
* the same help desk for separate tenants, which must not share;
* requests that bypass the cache, and some that come as token ids.

All of it is invented here and made of small parts. The output depends on nothing but this file: the only random
source is ``Random.random``, whose sequence Python keeps from version to version.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Final, TypeAlias

__all__ = ["generate"]

_Line: TypeAlias = dict[str, object]

_PLACES: Final = (
    "the north pier", "the lamp room", "the tide gauge", "the chart store", "the fog horn", "the boat shed",
    "the signal mast", "the weather desk", "the fuel cellar", "the old observatory", "the causeway", "the pump house",
)  # fmt: skip
_PEOPLE: Final = (
    "the keeper", "a relief crew", "the harbour office", "an apprentice", "the survey team", "the night watch",
    "a visiting engineer", "the archive clerk", "the supply boat", "the duty officer",
)  # fmt: skip
_DEEDS: Final = (
    "checked the seals of", "wrote a short report about", "repainted the markings on", "replaced a worn bearing in",
    "counted the spare parts for", "photographed the cracks near", "asked for a second opinion on",
    "moved the instruments away from", "tested the alarm beside", "closed the hatch of",
)  # fmt: skip
_ENDS: Final = (
    "before the evening tide", "while the wind was still from the west", "and noted the time in the log",
    "because the readings had drifted", "as the checklist asks every second week", "although nobody had complained",
    "and found nothing unusual", "after the storm of the previous night", "so that the inspection could start early",
    "and left a note for the next shift",
)  # fmt: skip
_QUESTIONS: Final = (
    "What was done at {place}?", "Who should look at {place} next?", "Is anything urgent about {place}?",
    "Summarise what is known about {place}.", "Which tool is needed at {place}?", "Why was {place} inspected at all?",
    "How long will the work at {place} take?", "Write one line for the log about {place}.",
)  # fmt: skip
_DESKS: Final = ("harbour help desk", "maintenance planner", "log book assistant", "visitor guide")
_LABELS: Final = ("repair", "supplies", "weather", "visitors", "paperwork")


class _Writer:
    """Small texts from a seeded source."""

    def __init__(self, seed: int) -> None:
        self._random = Random(seed)

    def below(self, limit: int) -> int:
        return int(self._random.random() * limit)

    def pick(self, options: tuple[str, ...]) -> str:
        return options[self.below(len(options))]

    def sentence(self) -> str:
        people, deed, place, end = (self.pick(words) for words in (_PEOPLE, _DEEDS, _PLACES, _ENDS))
        return f"{people[0].upper()}{people[1:]} {deed} {place} {end}."

    def text(self, sentences: int) -> str:
        return " ".join(self.sentence() for _ in range(sentences))

    def question(self) -> str:
        return self.pick(_QUESTIONS).format(place=self.pick(_PLACES))


def _system_prompt(writer: _Writer, desk: str) -> str:
    return (
        f"System: You are the {desk} of a small lighthouse station. Answer in plain words, in at most three sentences. "
        "Say so when the log does not answer a question, and never guess a time or a name. What the log says so far: "
        f"{writer.text(9)}\n"
    )


def _chat(writer: _Writer, prompt: str, turns: int, start: float) -> Iterator[tuple[float, _Line]]:
    for turn in range(turns):
        prompt += f"User: {writer.question()}\nAssistant: "
        yield start + turn * (14 + writer.below(30)), {"text": prompt, "max_new_tokens": 16 + writer.below(80)}
        prompt += writer.text(2) + "\n"


def _document(writer: _Writer, number: int, questions: int, start: float) -> Iterator[tuple[float, _Line]]:
    prompt = f"Document {number}: yearly report of the station, part {number}.\n{writer.text(55)}\n"
    for question in range(questions):
        text = f"{prompt}Question: {writer.question()}\nAnswer: "
        yield start + question * (3 + writer.below(25)), {"text": text, "max_new_tokens": 12 + writer.below(40)}


def _sorting(writer: _Writer, jobs: int) -> Iterator[tuple[float, _Line]]:
    prompt = (
        f"Sort each note into one of these drawers: {', '.join(_LABELS)}. Answer with one word. Examples:\n"
        + "".join(f"{writer.sentence()} -> {writer.pick(_LABELS)}\n" for _ in range(14))
    )
    for _ in range(jobs):
        text = f"{prompt}{writer.sentence()} -> "
        yield float(writer.below(400)), {
            "text": text, "max_new_tokens": 1 + writer.below(4), "commit_policy": "prefill_state_only"
        }  # fmt: skip


def _tenants(writer: _Writer, prompt: str, tenants: tuple[str, ...], each: int) -> Iterator[tuple[float, _Line]]:
    for tenant in tenants:
        for _ in range(each):
            text = f"{prompt}User: {writer.question()}\nAssistant: "
            line: _Line = {"text": text, "max_new_tokens": 8 + writer.below(40), "tenant": tenant}
            yield float(writer.below(400)), line


def _bypassing(writer: _Writer, prompt: str, count: int) -> Iterator[tuple[float, _Line]]:
    for _ in range(count):
        text = f"{prompt}User: {writer.question()}\nAssistant: "
        line: _Line = {"text": text, "max_new_tokens": 8 + writer.below(24), "lookup_policy": "bypass"}
        yield float(writer.below(400)), line


def _token_ids(writer: _Writer, families: int, each: int) -> Iterator[tuple[float, _Line]]:
    for family in range(families):
        shared = [1000 * (family + 1) + writer.below(1000) for _ in range(400)]
        for _ in range(each):
            tail = [writer.below(32_000) for _ in range(20 + writer.below(120))]
            yield float(writer.below(400)), {"token_ids": shared + tail, "max_new_tokens": 8 + writer.below(64)}


def generate(seed: int = 20_240_131) -> str:
    """The whole file: one JSON object a line, in order of arrival."""
    writer = _Writer(seed)
    systems = [_system_prompt(writer, desk) for desk in _DESKS]
    events: list[tuple[float, _Line]] = []
    for number in range(40):
        turns = 3 + writer.below(3)
        events += _chat(writer, systems[number % len(systems)], turns, float(writer.below(300)))
    for number in range(1, 11):
        events += _document(writer, number, 5, float(writer.below(300)))
    events += _sorting(writer, 36)
    events += _tenants(writer, systems[0], ("north", "south", "west"), 8)
    events += _bypassing(writer, systems[1], 16)
    events += _token_ids(writer, 3, 6)
    events.sort(key=lambda event: event[0])  # stable, so ties keep the order in which they were made
    return "".join(json.dumps({**line, "arrival": arrival}, separators=(",", ":")) + "\n" for arrival, line in events)


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: python -m context_cache.coordinator.cli.workloads.generate FILE")
    Path(sys.argv[1]).write_text(generate(), encoding="utf-8")
