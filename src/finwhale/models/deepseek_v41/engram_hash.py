"""Which rows of the Engram tables a token reads: hashes of the last tokens' compressed ids.

Tokens whose texts differ only in case, accents or spaces share a compressed id. A layer has one
table, with a part for each length of n-gram (2, 3 and 4 tokens) and hash head. The number of rows
of a part is a prime. Source: the authors' inference code for DeepSeek-V4.1.

Legend: N tokens, S the most tokens of an n-gram, X = (S - 1) * heads rows that a token reads.
"""

import itertools
import re
import unicodedata
from collections.abc import Callable

import numpy as np
import torch
from numpy.typing import NDArray

from finwhale.errors import CheckpointError
from finwhale.models.deepseek_v41.engram_config import EngramConfig
from finwhale.ops.deepseek_v41 import HashTensors

Ints = NDArray[np.int64]

SEED = 10007  # times the layer's number
# The spaces that the authors' library strips: not the separators U+001C to U+001F, as Python does.
SPACES = "".join(c for c in map(chr, range(0x3001)) if c.isspace() and not "\x1c" <= c <= "\x1f")


def compress_ids(text: Callable[[int], str], spelling: Callable[[int], str], size: int) -> Ints:
    """The compressed ids [size] of all token ids, numbered by first use.

    Args:
        text: the text of a token alone, with U+FFFD for partial UTF-8.
        spelling: the token's spelling in tokenizer.json, which identifies tokens without whole
            characters.
    """
    numbers: dict[str, int] = {}
    keys = []
    for token in range(size):
        own = text(token)
        key = spelling(token) if "\ufffd" in own else _simplified(own) or own
        keys.append(numbers.setdefault(key, len(numbers)))
    return np.array(keys, np.int64)


def _simplified(text: str) -> str:
    """Lower case, without accents, with single spaces and none at the ends; " " stays."""
    text = unicodedata.normalize("NFD", unicodedata.normalize("NFKC", text))
    # One by one, so that a final sigma is no other letter.
    text = "".join(c.lower() for c in text if not unicodedata.category(c).startswith("M"))
    text = re.sub("[ \t\r\n]+", " ", text)
    return text if text == " " else text.strip(SPACES)


def engram_hashes(config: EngramConfig) -> dict[int, HashTensors]:
    """The hashes of every layer that has a table, by the layer's number; on the CPU.

    Raises:
        CheckpointError: a table has another number of rows than its parts.
    """
    used = set[int]()
    hashes = {}
    for layer, num_rows in zip(config.layer_ids, config.num_embeddings, strict=True):
        highest = max(1, (2**63 - 1) // config.compressed_vocab_size // 2)
        drawn = np.random.default_rng(SEED * layer).integers(0, highest, config.max_ngram_size)
        # Each length of n-gram starts its search at the same number.
        above, heads = config.vocab_size - 1, config.n_heads
        lengths = range(2, config.max_ngram_size + 1)
        sizes = np.array([_next_primes(above, heads, used) for _ in lengths])
        if sizes.sum() != num_rows:
            raise CheckpointError(
                f"layer {layer}'s Engram table has {num_rows} rows; its {sizes.size} parts have "
                f"{sizes.sum()}"
            )
        starts = (sizes.cumsum() - sizes.ravel()).reshape(sizes.shape)
        hashes[layer] = HashTensors(*map(torch.from_numpy, (2 * drawn + 1, sizes, starts)))
    return hashes


def within(hashes: HashTensors, num_rows: int) -> HashTensors:
    """The hashes for a table of num_rows. One of random weights may have parts of fewer rows."""
    sizes, count = hashes.sizes, hashes.sizes.numel()
    if num_rows >= int(sizes.sum()):
        return hashes
    starts = torch.arange(count).view(sizes.shape) * (num_rows // count)
    return HashTensors(hashes.multipliers, torch.full_like(sizes, num_rows // count), starts)


def _next_primes(above: int, count: int, used: set[int]) -> list[int]:
    """The next primes after `above` that are not used; adds them to `used`."""
    fresh = (n for n in itertools.count(above + 1) if n not in used and _is_prime(n))
    found = list(itertools.islice(fresh, count))
    used.update(found)
    return found


def _is_prime(number: int) -> bool:
    return number > 1 and all(number % d for d in range(2, int(number**0.5) + 1))
