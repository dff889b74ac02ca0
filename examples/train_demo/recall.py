"""Measures how well the embedded model recalls earlier parts of the prompt, near and far, with
finwhale's own engine.

python recall.py --work FOLDER            the folder that data.py filled; prints JSON
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from random import Random

import chat
from data import DEMO, prose
from tokenizers import Tokenizer

import finwhale

COUNT = 40


def prompt_and_answer(pairs: list[chat.Pair]) -> tuple[str, str]:
    """A rendered non-thinking chat, cut before the last answer."""
    text = chat.render_chat(chat.Chat(pairs=pairs)).removesuffix(chat.EOS)
    start = text.rindex("</think>") + len("</think>")
    return text[:start], text[start:]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--work", type=Path, required=True)
    args = parser.parse_args()
    rng = Random("recall")
    passages = [d.text for d in prose(args.work / "raw") if d.held_out and len(d.text) > 11_000]
    kinds: dict[str, Callable[[], list[chat.Pair]]] = {
        "closed questions": lambda: [rng.choice([chat.capital, chat.opposite, chat.addition])(rng)],
        "said by the user": lambda: chat.introduction(rng),
        "questions on a story": lambda: chat.story_questions(rng),
        "one of 4 facts": lambda: [chat.table(rng, 4)],
        "one of 12 facts": lambda: [chat.table(rng, 12)],
        "one of 100 facts": lambda: [chat.table(rng, 100)],
        "sentence in a text, 300 characters": lambda: [
            chat.needle(rng, rng.choice(passages)[:300])
        ],
        "sentence in a text, 3,000 characters": lambda: [
            chat.needle(rng, rng.choice(passages)[:3000])
        ],
    }
    llm = finwhale.LLM()
    tokenizer = Tokenizer.from_file(str(DEMO / "tokenizer.json"))
    params = finwhale.SamplingParams(temperature=0, max_tokens=60)
    results = {}
    for name, make in kinds.items():
        asked = [prompt_and_answer(make()) for _ in range(COUNT)]
        outputs = llm.generate([tokenizer.encode(prompt).ids for prompt, _ in asked], params)
        right = [
            o.outputs[0].text.strip() == a.strip() for o, (_, a) in zip(outputs, asked, strict=True)
        ]
        tokens = sum(len(o.prompt_token_ids) for o in outputs) / COUNT
        results[name] = {"accuracy": sum(right) / COUNT, "prompt_tokens": round(tokens)}
    print(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
