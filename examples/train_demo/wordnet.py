"""Words, glosses, examples and relations from WordNet's data files, with the rude ones left out."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

_RUDE = re.compile(
    r"offensive|disparag|derogat|slur|vulgar|obscen|sex|genital|penis|vagin|prostitut|whore|nigger|negro|jew|homosexual|"
    r"pervert|rape|copulat|intercourse|fuck|shit|arse|buttock|breast|erotic|nude|naked|racial|nazi|terror|suicid|masturb|"
    r"faec|feces|excrement|urin|semen|ejacul|lesbian|slave|bastard|contempt|insult|idiot|moron|drug|cocaine|heroin",
    re.IGNORECASE,
)
_FILES = {"noun": "n", "verb": "v", "adj": "a"}


@dataclass(frozen=True, kw_only=True)
class Sense:
    word: str
    part: str  # noun, verb, adj
    gloss: str
    examples: list[str]
    synonyms: list[str]
    parents: list[str]  # words of the first hypernym
    count: int  # how often the sense was seen in a tagged corpus


def _offsets(folder: Path, part: str) -> dict[str, int]:
    """Lower-case word -> offset of its first sense."""
    first: dict[str, int] = {}
    for line in (folder / f"index.{part}").read_text(errors="replace").splitlines():
        if line.startswith(" "):
            continue
        items = line.split()
        pointers = int(items[3])
        if int(items[5 + pointers]) > 0:
            first[items[0]] = int(items[6 + pointers])
    return first


def _counts(folder: Path) -> dict[str, int]:
    """word%part -> how often it was tagged."""
    counts: dict[str, int] = {}
    for line in (folder / "cntlist.rev").read_text().splitlines():
        key, _, count = line.split()
        lemma, _, rest = key.partition("%")
        part = {"1": "noun", "2": "verb", "3": "adj", "5": "adj"}.get(rest[0], "adv")
        counts[f"{lemma}%{part}"] = counts.get(f"{lemma}%{part}", 0) + int(count)
    return counts


def load_senses(folder: Path) -> list[Sense]:
    """First senses of single lower-case words with an inoffensive gloss, most frequent words first.

    A word that is more than one part of speech is kept as its most frequent one.
    """
    counts, senses = _counts(folder), []
    for part in _FILES:
        by_offset: dict[int, tuple[list[str], str, int | None]] = {}
        for line in (folder / f"data.{part}").read_text(errors="replace").splitlines():
            if line.startswith("  "):
                continue
            head, _, gloss = line.partition(" | ")
            items = head.split()
            words = [re.sub(r"\(.*\)", "", w) for w in items[4 : 4 + 2 * int(items[3], 16) : 2]]
            parent = items.index("@") if "@" in items else None
            by_offset[int(items[0])] = (
                words,
                gloss.strip(),
                int(items[parent + 1]) if parent else None,
            )
        for word, offset in _offsets(folder, part).items():
            words, text, parent = by_offset[offset]
            if (
                not re.fullmatch(r"[a-z]{3,12}", word)
                or word not in words
                or _RUDE.search(text)
                or _RUDE.search(word)
            ):
                continue
            gloss = (
                re.sub(r"\([^)]*\)\s*", "", text.split('; "')[0]).split(";")[0].strip().rstrip(":.")
            )
            examples = [
                e for e in re.findall(r'"([^"]{8,90})"', text) if re.search(rf"\b{word}", e)
            ]
            if not 8 <= len(gloss) <= 110 or '"' in gloss or "`" in text:
                continue
            senses.append(
                Sense(
                    word=word,
                    part=part,
                    gloss=gloss,
                    examples=examples,
                    synonyms=[
                        w.replace("_", " ") for w in words if w.lower() != word and w.islower()
                    ],
                    parents=[w.replace("_", " ") for w in by_offset[parent][0]]
                    if parent in by_offset
                    else [],
                    count=counts.get(f"{word}%{part}", 0),
                )
            )
    senses.sort(key=lambda s: (-s.count, s.word, s.part))
    first = {sense.word: sense for sense in reversed(senses)}
    return [sense for sense in senses if first[sense.word] is sense]


def antonyms(folder: Path) -> list[tuple[str, str]]:
    """Pairs of antonymous adjectives, both words frequent."""
    counts = _counts(folder)
    lines: dict[int, list[str]] = {}
    for line in (folder / "data.adj").read_text(errors="replace").splitlines():
        if not line.startswith("  "):
            items = line.partition(" | ")[0].split()
            lines[int(items[0])] = items
    pairs = set()
    for items in lines.values():
        words = [re.sub(r"\(.*\)", "", w) for w in items[4 : 4 + 2 * int(items[3], 16) : 2]]
        for at, item in enumerate(items):
            if item == "!" and items[at + 2] == "a":
                source, target = int(items[at + 3][:2], 16), int(items[at + 3][2:], 16)
                other = lines[int(items[at + 1])]
                pair = (words[source - 1], re.sub(r"\(.*\)", "", other[2 + 2 * target]))
                known = all(
                    re.fullmatch(r"[a-z]{3,12}", w) and counts.get(f"{w}%adj", 0) >= 2 for w in pair
                )
                if known and not any(_RUDE.search(w) for w in pair):
                    pairs.add(pair)
    return sorted(pairs)
