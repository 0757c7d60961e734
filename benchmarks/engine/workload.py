"""What is asked of every engine: all requests at once, greedy, end tokens ignored, so all make the same tokens."""

from __future__ import annotations

import json
import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_FILE = Path(__file__).with_name("workload.json")


@dataclass(frozen=True, slots=True)
class Chat:
    prompt: list[int]
    output_tokens: int


def load(name: str) -> list[Chat]:
    """`single`, `w20` and `w64` of `workload.json`, by how many are at once, or `mixed`."""
    if name == "mixed":
        return _mixed()
    made: Any = json.loads(_FILE.read_text())[name]
    return [Chat(chat["ids"], chat["n"]) for chat in ([made] if isinstance(made, dict) else made)]


def _mixed(seed: int = 20) -> list[Chat]:
    """Twenty more, so that nothing is tuned to one file: lengths spread wider, words from the same texts."""
    rng = random.Random(seed)
    words = [token for chat in load("w20") for token in chat.prompt]
    chats = []
    for _ in range(20):
        prompt: list[int] = []
        for _ in range(round(2 ** rng.uniform(1, 6))):
            at = rng.randrange(len(words) - 8)
            prompt += words[at : at + 8]
        chats.append(Chat(prompt, rng.randint(16, 96)))
    return chats
