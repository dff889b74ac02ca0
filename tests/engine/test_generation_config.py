"""generation_config.json: end tokens of a checkpoint, and its defaults of sampling."""

import copy
import io
import json
import pickle
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from finwhale import LLM, CheckpointError, SamplingParams
from finwhale.checkpoint.config_files import read_config, sampling_defaults
from finwhale.cli.main import main
from finwhale.engine.loop.engine import Engine
from finwhale.models.registry import parse_config

TEXT = "The fin whale is"
HELLO = [{"role": "user", "content": "Hello"}]
FOUND = {"temperature": 0.6, "top_p": 0.9, "top_k": 7, "min_p": 0.1, "repetition_penalty": 1.5}


@pytest.fixture
def checkpoint(tiny_path: Path, tmp_path: Path) -> Callable[..., Path]:
    """Makes the tiny checkpoint with a generation_config.json."""

    def make(**content: Any) -> Path:
        path = tmp_path / f"model{len(list(tmp_path.iterdir()))}"
        shutil.copytree(tiny_path, path)
        (path / "generation_config.json").write_text(json.dumps(content))
        return path

    return make


@pytest.fixture
def begun(monkeypatch: pytest.MonkeyPatch) -> list[SamplingParams]:
    """The parameters with which requests begin."""
    found: list[SamplingParams] = []
    add = Engine.add_request

    def watched(self: Engine, name: str, ids: Any, params: SamplingParams, *more: Any, **by: Any):
        found.append(params)
        return add(self, name, ids, params, *more, **by)

    monkeypatch.setattr(Engine, "add_request", watched)
    return found


def values(params: SamplingParams) -> dict[str, Any]:
    return {name: getattr(params, name) for name in FOUND}


PLAIN = values(SamplingParams())
FOUND_OR_COMMAND = PLAIN | {"temperature": 0.7, "top_p": 0.5, "top_k": 7}


def test_defaults_of_a_checkpoint(
    checkpoint: Callable[..., Path], new_llm: Callable[..., LLM], begun: list[SamplingParams]
) -> None:
    """They hold where a call leaves fields out, but never against what it gives."""
    path = checkpoint(
        **FOUND, do_sample=False, max_new_tokens=3, transformers_version="5", top=None
    )
    llm = new_llm(path)
    short = SamplingParams(max_tokens=5, ignore_eos=True)
    given = SamplingParams(max_tokens=5, temperature=1.0, top_k=0)
    (result,) = llm.generate(TEXT, short)
    assert len(result.outputs[0].token_ids) == 5
    llm.generate([TEXT, TEXT], [given, pickle.loads(pickle.dumps(given))])
    llm.generate(TEXT, copy.deepcopy(short))
    llm.chat(HELLO, short)
    list(llm.stream(TEXT, short))
    mixed = FOUND | {"temperature": 1.0, "top_k": 0}
    assert [values(one) for one in begun] == [FOUND, mixed, mixed, FOUND, FOUND, FOUND]
    assert values(llm.get_default_sampling_params()) == FOUND
    begun.clear()
    other = new_llm(path, generation_config="none")
    other.generate(TEXT, short)
    assert [values(one) for one in begun] == [PLAIN]
    assert other.get_default_sampling_params() == SamplingParams()


def test_parameters_remember_what_was_given() -> None:
    params = SamplingParams(temperature=1.0, stop="x", n=2)
    for same in (params, pickle.loads(pickle.dumps(params)), copy.copy(params)):
        assert same == params and same.given == {"temperature", "stop", "n"}
        changed = same.with_defaults({"temperature": 0.5, "top_k": 3})
        assert (changed.temperature, changed.top_k, changed.stop) == (1.0, 3, ("x",))
    assert params.with_defaults({}) is params
    assert replace(params, seed=1).with_defaults({"top_k": 3}).top_k == 0
    with pytest.raises(TypeError, match="unexpected keyword argument 'top'"):
        SamplingParams(top=1)  # type: ignore[call-arg]


@pytest.mark.parametrize("several", [False, True])
def test_end_tokens_always_hold(
    llm: LLM, new_llm: Callable[..., LLM], checkpoint: Callable[..., Path], several: bool
) -> None:
    greedy = SamplingParams(temperature=0, max_tokens=20, repetition_penalty=1.0)
    whole = llm.generate(TEXT, replace(greedy, ignore_eos=True))[0].outputs[0].token_ids
    end = next(i for i in range(3, 20) if whole[i] not in whole[:i])
    path = checkpoint(eos_token_id=[1, whole[end]] if several else whole[end])
    other = new_llm(path, generation_config="none")
    (result,) = other.generate(TEXT, greedy)
    assert result.outputs[0].token_ids == whole[: end + 1]
    assert result.outputs[0].finish_reason == "stop"
    assert parse_config(read_config(path)).eos_token_ids == (1, whole[end])


def test_a_trainer_s_checkpoint_may_lack_the_file(
    new_llm: Callable[..., LLM], checkpoint: Callable[..., Path], tiny_path: Path
) -> None:
    new_llm(checkpoint(eos_token_id=[1, 5])).update_weights(tiny_path)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({"eos_token_id": "x"}, "eos_token_id must be a token id or a list of them, got"),
        ({"eos_token_id": [True]}, "eos_token_id must be a token id or a list of them, got"),
        ({"eos_token_id": 1 << 40}, "is outside the vocabulary"),
        ({"temperature": "hot"}, "temperature must be a number, got 'hot'; generation_config none"),
        ({"top_p": 2}, "top_p must be above 0 and at most 1, got 2; generation_config none"),
    ],
)
def test_wrong_values(checkpoint: Callable[..., Path], content: Any, message: str) -> None:
    path = checkpoint(**content)
    with pytest.raises(CheckpointError, match=message) as error:
        LLM(path, device="cpu")
    assert "\n" not in str(error.value)
    if "eos_token_id" not in content:
        LLM(path, device="cpu", generation_config="none")


def test_a_file_that_is_not_json(checkpoint: Callable[..., Path]) -> None:
    path = checkpoint()
    assert sampling_defaults(path) == {}
    (path / "generation_config.json").write_text("[")
    with pytest.raises(CheckpointError, match=r"generation_config\.json is not JSON"):
        LLM(path, device="cpu")


def test_commands(
    checkpoint: Callable[..., Path],
    begun: list[SamplingParams],
    one_thread: None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The command line comes first, then the checkpoint, then the defaults of the command."""
    path = checkpoint(top_p=0.5, top_k=7)
    command = ["generate", TEXT, "--model", str(path), "--device", "cpu", "--max-tokens", "2"]
    command_s = {"temperature": 0.7, "top_p": 0.95}
    for more, wanted in (
        ([], FOUND_OR_COMMAND),
        (["--top-p", "1", "--temperature", "0"], PLAIN | {"temperature": 0.0, "top_k": 7}),
        (["--generation-config", "none"], PLAIN | command_s),
    ):
        begun.clear()
        assert main([*command, *more]) == 0
        assert [values(one) for one in begun] == [wanted]
    monkeypatch.setattr("sys.stdin", io.StringIO("Hello\n"))
    begun.clear()
    assert main(["chat", *command[2:]]) == 0
    assert [values(one) for one in begun] == [
        PLAIN | {"temperature": 0.7, "top_p": 0.5, "top_k": 7}
    ]
