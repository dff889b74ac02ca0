"""Broken and hostile checkpoints: one clear line each, before anything is allocated."""

import copy
import json
import os
import shutil
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.support.official_config import config_json

from finwhale.chat.effort import effort_ladder
from finwhale.chat.tokenizer import Tokenizer
from finwhale.checkpoint.config_files import read_config
from finwhale.checkpoint.reader import INDEX_FILE, Checkpoint
from finwhale.cli.main import main
from finwhale.demo import DEMO_PATH
from finwhale.errors import CheckpointError
from finwhale.models.deepseek_v4.presets import published
from finwhale.models.registry import parse_config

Json = dict[str, Any]
Keys = tuple[str, ...]

CONFIGS: dict[str, Json] = {
    "demo": read_config(DEMO_PATH),
    **{name: config_json(published(name)) for name in ("flash", "pro", "flash-0731")},
}
NOT_SIZES: tuple[Any, ...] = (
    -1, -(10**30), float("nan"), float("inf"), True, "x", "1", 10**12, 10**30, 1e300, {}, {"a": 1},
)  # fmt: skip
# Numbers that have no effect here.
UNUSED = {"attention_dropout", "initializer_range"}


def numbers(config: Json, path: Keys = ()) -> Iterator[Keys]:
    """The paths of all numbers of a config.json."""
    for key, value in config.items():
        if isinstance(value, dict):
            yield from numbers(value, (*path, key))
        elif isinstance(value, int | float) and not isinstance(value, bool) and key not in UNUSED:
            yield (*path, key)


def changed(config: Json, path: Keys, value: Any) -> Json:
    config = copy.deepcopy(config)
    inner = config
    for key in path[:-1]:
        inner = inner[key]
    inner[path[-1]] = value
    return config


@pytest.mark.parametrize("name", CONFIGS)
def test_every_number_of_a_config_has_bounds(name: str) -> None:
    config = CONFIGS[name]
    parse_config(config)
    paths = list(numbers(config))
    assert len(paths) > 30
    for path in paths:
        for value in NOT_SIZES:
            with pytest.raises(CheckpointError) as caught:
                parse_config(changed(config, path, value))
            message = str(caught.value)
            assert "\n" not in message and len(message) < 300, (path, value)


@pytest.mark.parametrize("name", CONFIGS)
def test_no_value_of_a_config_is_an_unclear_error(name: str) -> None:
    config = CONFIGS[name]
    for key in config:
        for value in (*NOT_SIZES, None, [], [1], [{}], ["x"], [[]], [10**12] * 3, [float("nan")]):
            try:
                parse_config(changed(config, (key,), value))
            except CheckpointError as error:
                assert "\n" not in str(error) and len(str(error)) < 400, (key, value)


def demo_copy(directory: Path, **files: bytes) -> Path:
    """The demo checkpoint with other contents of some files ("." is written "_")."""
    directory.mkdir(exist_ok=True)
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json", "model.safetensors"):
        key = name.replace(".", "_")
        if key in files:
            (directory / name).write_bytes(files[key])
        elif name == "model.safetensors":
            for path in DEMO_PATH.glob("*.safetensors"):
                (directory / path.name).symlink_to(path)
            shutil.copyfile(DEMO_PATH / INDEX_FILE, directory / INDEX_FILE)  # tests change it
        else:
            (directory / name).symlink_to(DEMO_PATH / name)
    return directory


DEEP = b"[" * 100_000


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({"config_json": DEEP}, "config.json is nested too deeply"),
        ({"config_json": b"\xff\xfe"}, "config.json is not JSON"),
        ({"config_json": b"[]"}, "must hold a JSON object"),
        ({"model_safetensors": struct.pack("<Q", 2**63)}, "not a safetensors file"),
        ({"model_safetensors": struct.pack("<Q", 9 * 10**7) + b"{}"}, "truncated"),
        ({"model_safetensors": struct.pack("<Q", len(DEEP)) + DEEP}, "damaged"),
    ],
)
def test_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], files: dict[str, bytes], message: str
) -> None:
    path = demo_copy(tmp_path / "checkpoint", **files)
    assert main(["inspect", str(path)]) == 1
    err = capsys.readouterr().err
    assert message in err and err.count("\n") == 1, err


def test_loops_of_links(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    loop = tmp_path / "loop"
    loop.symlink_to(loop)
    path = demo_copy(tmp_path / "checkpoint")
    for name in ("config.json", "base.safetensors"):
        (path / name).unlink()
        (path / name).symlink_to(path / name)
        assert main(["inspect", str(path)]) == 1
        assert capsys.readouterr().err.count("\n") == 1
        (path / name).unlink()
        (path / name).symlink_to(DEMO_PATH / name)
    assert main(["inspect", str(loop)]) == 1
    assert "Too many levels of symbolic links" in capsys.readouterr().err


READERS: dict[str, Callable[[Path], object]] = {
    "config.json": read_config,
    "tokenizer.json": Tokenizer.find,
    "tokenizer_config.json": Tokenizer.open,
    "encoding/encoding_dsv4.py": effort_ladder,
    INDEX_FILE: Checkpoint.open,
    "base.safetensors": Checkpoint.open,
}


@pytest.mark.parametrize("name", READERS)
@pytest.mark.parametrize("kind", ["loop", "pipe", "directory", "device"])
def test_what_is_no_file(tmp_path: Path, name: str, kind: str) -> None:
    """Nothing waits for a pipe, and nothing is taken for missing."""
    path = demo_copy(tmp_path / "checkpoint") / name
    path.parent.mkdir(exist_ok=True)
    path.unlink(missing_ok=True)
    if kind == "directory":
        path.mkdir()
    elif kind == "pipe":
        os.mkfifo(path)
    else:
        path.symlink_to(path if kind == "loop" else Path("/dev/zero"))
    wanted = "cannot be read: Too many levels" if kind == "loop" else "is not a regular file"
    with pytest.raises(CheckpointError, match=f"checkpoint/{name} {wanted}"):
        READERS[name](tmp_path / "checkpoint")


@pytest.mark.parametrize("path", ["\0", "\ud800", "x" * 300, "/" * 5000 + "x", "/dev/null", "/"])
def test_odd_paths(path: str) -> None:
    with pytest.raises(CheckpointError):
        Checkpoint.open(path)
    with pytest.raises(CheckpointError):
        Checkpoint.open(Path("/tmp") / path)


def test_odd_names_in_an_index(tmp_path: Path) -> None:
    path = demo_copy(tmp_path / "checkpoint")
    for name in ("\0", "\ud800", "x" * 300):
        (path / INDEX_FILE).write_text(json.dumps({"weight_map": {"x": name}}))
        with pytest.raises(CheckpointError):
            Checkpoint.open(path)


def header(**entry: Any) -> bytes:
    entry = {"dtype": "BF16", "shape": [2], "data_offsets": [0, 4], **entry}
    text = json.dumps({"layers.0.ffn.experts.gate_up_proj": entry}).encode()
    return struct.pack("<Q", len(text)) + text + bytes(4)


@pytest.mark.parametrize(
    "entry",
    [
        {"shape": [10**9, 0, 0]},
        {"shape": [10**9, 2, 2]},
        {"shape": [-2]},
        {"shape": [-1, -2]},
        {"shape": [3]},
        {"shape": "2"},
        {"shape": 2},
        {"shape": [float("inf")]},
        {"shape": [None]},
        {"data_offsets": [1, 4]},
        {"data_offsets": [-4, 4]},
        {"data_offsets": [2, 0]},
        {"data_offsets": [0, 4, 9]},
        {"data_offsets": [4]},
        {"data_offsets": "04"},
        {"data_offsets": {}},
        {"dtype": []},
        {"dtype": "F32"},
    ],
)
def test_headers_that_lie(tmp_path: Path, entry: Json) -> None:
    path = demo_copy(tmp_path / "checkpoint", model_safetensors=header(**entry))
    with pytest.raises(CheckpointError):
        Checkpoint.open(path)


@pytest.mark.parametrize(
    "index",
    [[], {}, {"weight_map": []}, {"weight_map": {}}, {"weight_map": {"x": 5}}, {"weight_map": "x"},
     {"weight_map": {"x": "/etc/passwd"}}, {"weight_map": {"x": "../../x"}}],
)  # fmt: skip
def test_indices_of_another_shape(tmp_path: Path, index: Any) -> None:
    path = demo_copy(tmp_path / "checkpoint")
    (path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(CheckpointError):
        Checkpoint.open(path)


TOKENIZER = json.loads((DEMO_PATH / "tokenizer.json").read_text())


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (("model",), 5),
        (("model",), []),
        (("model", "vocab"), []),
        (("model", "vocab"), {}),
        (("model", "vocab"), {"a": 10**12}),
        (("model", "vocab"), {"a": -1}),
        (("model", "vocab"), {"a": "x"}),
        (("model", "vocab"), {"a": float("inf")}),
        (("model", "merges"), 5),
        (("model", "type"), "Unigram"),
        (("added_tokens",), 5),
        (("added_tokens",), [5]),
        (("added_tokens",), [{"content": "a", "id": 10**12, "special": True}]),
        (("added_tokens",), [{"content": "\ud800", "id": 1, "special": True}]),
        (("decoder",), None),
        (("pre_tokenizer",), 5),
    ],
)
def test_tokenizers_of_another_shape(tmp_path: Path, path: Keys, value: Any) -> None:
    text = json.dumps(changed(TOKENIZER, path, value)).encode()
    with pytest.raises(CheckpointError) as caught:
        Tokenizer.open(demo_copy(tmp_path / "checkpoint", tokenizer_json=text))
    assert "\n" not in str(caught.value)


def test_a_deep_tokenizer(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="nested too deeply"):
        Tokenizer.open(demo_copy(tmp_path / "checkpoint", tokenizer_json=DEEP))
