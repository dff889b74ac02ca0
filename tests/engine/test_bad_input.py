"""What users do wrong: one clear line each, nothing half done, no traceback."""

import json
import math
import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.support.integrity import check_engine
from tests.support.tiny import random_weights, with_dspark, write_plain_checkpoint
from tests.support.writer import write_checkpoint

from finwhale import LLM, CheckpointError, FinwhaleError, RequestError, SamplingParams
from finwhale.checkpoint.reader import Checkpoint
from finwhale.cli.main import main
from finwhale.engine.ranks.ranks import first_rank
from finwhale.engine.start import budget, startup
from finwhale.errors import ResourceError
from finwhale.models.deepseek_v4.config_json import config_of
from finwhale.models.deepseek_v4.weights import weight_specs
from finwhale.weights.source import WeightSource

GREEDY = SamplingParams(temperature=0, max_tokens=5, ignore_eos=True)
Capture = pytest.CaptureFixture[str]


def fails(capsys: Capture, *args: object) -> str:
    """Runs a command that must fail with one line on stderr; returns the line."""
    assert main([str(a) for a in args]) == 1
    captured = capsys.readouterr()
    assert captured.out == ""
    prefix, _, message = captured.err.partition("finwhale: error: ")
    assert prefix == "" and message.count("\n") == 1 and message.endswith("\n"), captured.err
    return message.strip()


# --- Checkpoints ----------------------------------------------------------------------------------


@pytest.fixture
def path(tiny_path: Path, tmp_path: Path) -> Path:
    """The tiny checkpoint in files of 3 MB, to be damaged."""
    config = json.loads((tiny_path / "config.json").read_text())
    specs = weight_specs(config_of(config))
    out = tmp_path / "damaged"
    weights = random_weights(config, seed=3)
    write_checkpoint(
        out, config, weights.items(), specs, plain_dtype=torch.float32, max_shard_bytes=3_000_000
    )
    shutil.copy(tiny_path / "tokenizer.json", out)
    return out


def shard(path: Path, number: int = 1) -> Path:
    return sorted(path.glob("*.safetensors"))[number]


def change(path: Path, **values: Any) -> None:
    file = path / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | values))


def change_tensor(path: Path, edit: Callable[[torch.Tensor], torch.Tensor]) -> str:
    """Rewrites one tensor of the second file; returns its name."""
    tensors = load_file(shard(path))
    name = next(n for n in sorted(tensors) if n.endswith("wq_a.weight") or n.endswith("w1.weight"))
    tensors[name] = edit(tensors[name]).contiguous()
    save_file(tensors, shard(path))
    return name


def truncate(path: Path) -> str:
    file = shard(path)
    file.write_bytes(file.read_bytes()[:-1])
    return f"{file.name} is truncated"


def remove_shard(path: Path) -> str:
    file = shard(path)
    file.unlink()
    return file.name


def swap_shards(path: Path) -> str:
    first, second = shard(path, 0), shard(path, 1)
    shutil.copy(second, first)
    return "is in two files"


def wrong_dtype(path: Path) -> str:
    return f"{change_tensor(path, lambda t: t.to(torch.int8))} is I8"


def wrong_shape(path: Path) -> str:
    return f"{change_tensor(path, lambda t: t[:-1])} is F32"


def not_a_number(path: Path) -> str:
    name = change_tensor(path, lambda t: t.index_fill(0, torch.tensor(0), math.nan))
    return f"{name} in {shard(path).name} holds a value that is not finite"


def missing_tensor(path: Path) -> str:
    tensors = load_file(shard(path))
    name = sorted(tensors)[0]
    del tensors[name]
    save_file(tensors, shard(path))
    return name


def another_size(path: Path) -> str:
    change(path, hidden_size=128)
    return "Check that config.json belongs to these files"


def fewer_layers(path: Path) -> str:
    change(path, num_hidden_layers=3, compress_ratios=[0, 4, 128, 0])
    return "config.json does not imply"


def more_layers(path: Path) -> str:
    change(path, num_hidden_layers=5, compress_ratios=[0, 4, 128, 4, 4, 0])
    return "layers.4."


def another_architecture(path: Path) -> str:
    change(path, model_type="deepseek_v3", architectures=["DeepseekV3ForCausalLM"])
    return "DeepseekV3ForCausalLM"


def broken_config(path: Path) -> str:
    (path / "config.json").write_text('{"model_type": ')
    return "is not JSON"


def no_object(path: Path) -> str:
    (path / "config.json").write_text("[1]")
    return "must hold a JSON object"


def no_config(path: Path) -> str:
    (path / "config.json").unlink()
    return "has no config.json"


def missing_field(path: Path) -> str:
    change(path, head_dim=None)
    return "head_dim"


def wrong_type(path: Path) -> str:
    change(path, index_topk="many")
    return "index_topk"


def no_weights(path: Path) -> str:
    for file in path.glob("model*"):
        file.unlink()
    return "has neither model.safetensors nor"


def broken_index(path: Path) -> str:
    (path / "model.safetensors.index.json").write_text("{}")
    return "weight_map"


def lfs_pointer(path: Path) -> str:
    shard(path).write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n")
    return "git lfs pull"


def html_page(path: Path) -> str:
    shard(path).write_text("<!DOCTYPE html><html><body>Sign in</body></html>" * 20)
    return "is not a safetensors file"


def broken_tokenizer(path: Path) -> str:
    (path / "tokenizer.json").write_text('{"model": {}}')
    return "tokenizer.json"


DAMAGES = [
    truncate, remove_shard, swap_shards, wrong_dtype, wrong_shape, not_a_number, missing_tensor,
    another_size, fewer_layers, more_layers, another_architecture, broken_config, no_object,
    no_config, missing_field, wrong_type, no_weights, broken_index, lfs_pointer, html_page,
    broken_tokenizer,
]  # fmt: skip


@pytest.mark.parametrize("damage", DAMAGES, ids=lambda d: d.__name__)
def test_a_damaged_checkpoint(
    damage: Callable[[Path], str], path: Path, capsys: Capture, one_thread: None
) -> None:
    wanted = damage(path)
    with pytest.raises(CheckpointError, match=re.escape(wanted)) as error:
        LLM(path, device="cpu")
    assert "\n" not in str(error.value)
    assert wanted in fails(capsys, "generate", "hi", "--model", path, "--device", "cpu")


def test_the_undamaged_checkpoint_loads(path: Path, one_thread: None) -> None:
    assert len(list(path.glob("*.safetensors"))) > 2
    assert LLM(path, device="cpu").generate("hi", GREEDY)[0].error is None


def test_a_path_that_is_not_a_directory(path: Path, capsys: Capture) -> None:
    for wrong, why in (
        (path / "config.json", "it is a file, not a directory"),
        (path / "nothing", "no such directory"),
    ):
        for command in (["generate", "hi", "--model"], ["chat", "--model"], ["inspect"]):
            assert why in fails(capsys, *command, wrong)


# --- Options of the engine ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("option", "value", "wanted"),
    [
        ("device", "nonsense", "device must be"),
        ("device", "meta", "device must be"),
        ("device", "cpu:3", "device must be"),
        ("device", "cuda:99", "device 'cuda:99' is not available: torch sees"),
        ("dtype", "float16", "dtype must be"),
        ("activations", "rounded", "activations must be"),
        ("wo_a_input", "fp16", "wo_a_input must be"),
        ("load_format", "pickle", "load_format must be"),
        ("max_model_len", 0, "max_model_len must be at least 2"),
        ("max_model_len", "100", "max_model_len must be an integer"),
        ("max_model_len", 513, "the model's context is 512 tokens"),
        ("max_num_seqs", -1, "max_num_seqs must be at least 1"),
        ("max_num_seqs", 2.0, "max_num_seqs must be an integer or None"),
        ("max_num_batched_tokens", 0, "max_num_batched_tokens must be at least 1"),
        ("cache_memory_bytes", 2e9, "cache_memory_bytes must be an integer"),
        ("cache_memory_bytes", 1000, "the cache needs at least"),
        ("prefix_salt", "", "prefix_salt must not be empty"),
        ("prefix_salt", b"secret", "prefix_salt must be a string, got bytes"),
    ],
)
def test_options(tiny_path: Path, option: str, value: Any, wanted: str) -> None:
    with pytest.raises(FinwhaleError, match=re.escape(wanted)) as error:
        LLM(tiny_path, **{"device": "cpu", option: value})
    assert "\n" not in str(error.value)


def test_an_option_without_an_effect_is_refused(tiny_path: Path) -> None:
    """Exact activations round nothing, so wo_a's input cannot be rounded otherwise."""
    for value in ("fp8", "bf16"):
        assert LLM(tiny_path, device="cpu", wo_a_input=value)  # type: ignore[arg-type]
    with pytest.raises(FinwhaleError, match='means nothing with activations "exact"'):
        LLM(tiny_path, device="cpu", activations="exact", wo_a_input="bf16")


def test_options_are_checked_before_weights_are_read(tiny_path: Path) -> None:
    read: list[int] = []
    for options in ({"device": "cuda:99"}, {"device": "cpu", "max_model_len": 10**6}):
        with pytest.raises(FinwhaleError):
            LLM(tiny_path, progress=lambda done, total: read.append(done), **options)  # type: ignore[arg-type]
    assert read == []


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.\nMore of it"),
        RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes"),
        MemoryError("Unable to allocate 9 bytes"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_weights_that_do_not_fit(
    tiny_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    def full(*shape: object, **options: object) -> torch.Tensor:
        raise error

    with monkeypatch.context() as patched:
        patched.setattr("finwhale.weights.allocation.torch.empty", full)
        with pytest.raises(ResourceError, match="the model does not fit cpu: ") as raised:
            LLM(tiny_path, device="cpu")
    assert str(error).splitlines()[0] in str(raised.value) and "\n" not in str(raised.value)


def test_a_gpu_without_room_is_refused_before_anything_is_read(
    tiny_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the check that a start on a GPU makes first, here on the CPU."""
    room, shares, loaded = 0, [], []

    def remaining(device: torch.device, share: float) -> int:
        shares.append(share)
        return room

    def checked(start: Any) -> Any:
        start.budget.check_fits_gpu(start.chosen.assembler(torch.device("meta")).num_bytes)
        start._load()
        loaded.append(start.weight_bytes)
        raise ResourceError("enough")

    monkeypatch.setattr(budget, "remaining_bytes", remaining)
    monkeypatch.setattr(startup._Start, "open", checked)
    for room, cache_bytes, found in (
        (10**9, None, "enough"),
        (1000, None, r"the weights take .* use more GPUs"),
        (1000, 10**9, r"the weights take .* use more GPUs"),
        (0, None, "the cache needs at least"),  # the weights and 1,000 bytes
        (0, 10**9, "enough"),
    ):
        room = room or loaded[0] + 1000
        with pytest.raises(ResourceError, match=found):
            LLM(tiny_path, device="cpu", max_model_len=256, cache_memory_bytes=cache_bytes)
    assert len(loaded) == 2
    assert shares == [0.9, 0.9, 1.0, 0.9, 1.0]


def test_a_context_that_the_memory_does_not_hold(tiny_path: Path) -> None:
    sizes: dict[str, Any] = {"max_num_seqs": 1, "enable_prefix_caching": False}
    executor = LLM(tiny_path, device="cpu", max_model_len=256, **sizes)._engine.executor
    sizes["cache_memory_bytes"] = executor.description.memory.cache
    with pytest.raises(ResourceError, match="max_model_len 512 was asked for") as error:
        LLM(tiny_path, device="cpu", max_model_len=512, **sizes)
    assert "cache_memory_bytes" in str(error.value)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_cuda_without_a_gpu(tiny_path: Path, capsys: Capture) -> None:
    line = fails(capsys, "generate", "hi", "--model", tiny_path, "--device", "cuda")
    assert line == "device 'cuda' is not available: torch sees 0 GPUs"


@pytest.mark.parametrize(
    ("args", "wanted"),
    [
        (("--device", "nonsense"), "device must be"),
        (("--max-model-len", "0"), "max_model_len must be at least 2, got 0"),
        (("--max-model-len", "-1"), "max_model_len must be at least 2, got -1"),
        (("--max-model-len", "4000"), "the model's context is 512 tokens"),
        (("--max-model-len", "2"), "room for 2"),
        (("--max-tokens", "0"), "max_tokens must be at least 1"),
        (("--temperature", "nan"), "temperature must be 0 to 100"),
        (("--temperature", "inf"), "temperature must be 0 to 100"),
        (("--temperature", "-0.1"), "temperature must be"),
        (("--top-p", "0"), "top_p must be"),
        (("--top-p", "nan"), "top_p must be"),
        (("--top-k", "-2"), "top_k must be"),
        (("--min-p", "1.5"), "min_p must be"),
        (("--repetition-penalty", "0"), "repetition_penalty must be 0.001 to 100"),
        (("--presence-penalty", "-1000"), "presence_penalty must be"),
        (("--stop", ""), "stop must be non-empty"),
    ],
)
def test_options_of_the_command_line(
    tiny_path: Path, capsys: Capture, args: tuple[str, ...], wanted: str
) -> None:
    command = ("generate", "hi", "--model", tiny_path, "--device", "cpu")
    assert wanted in fails(capsys, *command, *args)


@pytest.mark.parametrize(
    "args", [("--seed", "-5"), ("--seed", "9" * 30), ("--max-tokens", "9" * 30)]
)
def test_unusual_values_that_are_accepted(
    tiny_path: Path, capsys: Capture, args: tuple[str, ...], one_thread: None
) -> None:
    command = ("generate", "hi", "--model", str(tiny_path), "--device", "cpu", "--max-model-len")
    assert main([*command, "20", *args]) == 0
    assert capsys.readouterr().err == ""


# --- Prompts --------------------------------------------------------------------------------------

BAD_PROMPTS: list[tuple[Any, str]] = [
    ("", "the prompt is empty"),
    ([], "the prompt is empty"),
    ("whale " * 1000, "room for 512"),
    ([5] * 512, "the prompt has 512 tokens"),
    ([5, -1], "prompt token 1 is -1"),
    ([400], "prompt token 0 is 400: token ids are integers in 0..399"),
    ([5, 6, 10**20], "prompt token 2 is 1000"),
    ([5, "6"], "prompt token 1 is '6'"),
    ([5.0], "prompt token 0 is 5.0"),
    ([True], "prompt token 0 is True"),
    ([None], "prompt token 0 is None"),
    ([math.nan], "prompt token 0 is nan"),
    ([[5]], "prompt token 0 is [5]"),
    ("a\udc80b", "not valid Unicode"),
]


@pytest.mark.parametrize(("bad", "wanted"), BAD_PROMPTS)
def test_a_bad_prompt_fails_alone(llm: LLM, bad: Any, wanted: str) -> None:
    good = llm.generate([[5, 6, 7], "The whale"], GREEDY)
    first, failed, second = llm.generate([[5, 6, 7], bad, "The whale"], GREEDY)
    assert failed.error is not None and wanted in failed.error and "\n" not in failed.error
    assert failed.finished and failed.outputs[0].finish_reason == "error"
    assert failed.outputs[0].token_ids == [] and failed.outputs[0].text == ""
    for found, expected in zip((first, second), good, strict=True):
        assert found.error is None
        assert found.outputs[0].token_ids == expected.outputs[0].token_ids
    check_engine(llm._engine)


@pytest.mark.parametrize(("bad", "wanted"), BAD_PROMPTS)
def test_a_refused_request_leaves_nothing_in_the_engine(llm: LLM, bad: Any, wanted: str) -> None:
    if isinstance(bad, str):
        with pytest.raises(RequestError, match=re.escape(wanted)):
            list(llm.stream(bad))
    else:
        with pytest.raises(RequestError, match=re.escape(wanted)):
            llm._engine.add_request("bad", bad, GREEDY)
    assert not llm._engine.has_work


@pytest.mark.parametrize(
    ("params", "wanted"),
    [
        ({"stop_token_ids": [400]}, "stop_token_ids: token id 400 is not in 0..399"),
        ({"stop_token_ids": [5, 10**15]}, "is not in 0..399"),
    ],
)
def test_params_that_do_not_fit_the_model(llm: LLM, params: dict[str, Any], wanted: str) -> None:
    good, bad = llm.generate([[5], [5]], [GREEDY, SamplingParams(**params)])
    assert good.error is None and len(good.outputs[0].token_ids) == 5
    assert bad.error is not None and wanted in bad.error


ABSURD: dict[str, list[Any]] = {
    "n": [0, -1, math.nan, math.inf, "1", None, 10**9],
    "max_tokens": [0, -1, math.nan, math.inf, "1", 2.5],
    "temperature": [-1, math.nan, math.inf, -math.inf, "hot", None, [1.0]],
    "top_k": [-2, math.nan, math.inf, "5", 1.5, None],
    "top_p": [0, -1, 1.5, math.nan, math.inf, "0.9", None],
    "min_p": [-0.1, 1.1, math.nan, -math.inf, "0", None],
    "repetition_penalty": [0, -1, math.nan, math.inf, "1", None],
    "presence_penalty": [math.nan, math.inf, 1000, "0", None],
    "frequency_penalty": [math.nan, -math.inf, -1000, "0", None],
    "stop": ["", [""], [None], 5, math.nan],
    "stop_token_ids": [[-1], ["5"], [math.nan], [1.5], 5],
    "allowed_token_ids": [[-1], ["5"], [math.nan], [1.5], 5, "5"],
    "bad_words": ["bad", [""], [None], 5, math.nan],
    "min_tokens": [-1, math.nan, math.inf, "1", 2.5, None],
    "ignore_eos": ["yes", 1, None],
    "include_stop_str_in_output": ["yes", 1, None],
    "skip_special_tokens": ["no", 0, None],
    "seed": [math.nan, math.inf, "7", 1.5],
    "logprobs": [-1, 10**6, math.nan, "5", True],
    "prompt_logprobs": [-1, 10**6, math.nan, "5", True],
    "return_routed_experts": [1, "yes", None],
    "logit_bias": [5, [1], {"1": 1}, {-1: 1}, {1.5: 1}, {1: 101}, {1: math.nan}, {1: None}],
    "guide": ["a+", {}, 1],
}


def test_every_sampling_field_is_checked() -> None:
    assert set(ABSURD) == set(SamplingParams.__slots__)


@pytest.mark.parametrize(("name", "value"), [(n, v) for n, vs in ABSURD.items() for v in vs])
def test_absurd_sampling_values(name: str, value: Any) -> None:
    with pytest.raises(RequestError, match=f"^{name} must be") as error:
        SamplingParams(**{name: value})
    assert "\n" not in str(error.value) and "got" in str(error.value)


# --- A DSpark draft head --------------------------------------------------------------------------


def test_dspark_is_shown_and_left_out_without_drafting(
    tiny_path: Path, tmp_path: Path, capsys: Capture, caplog: pytest.LogCaptureFixture,
    one_thread: None,
) -> None:  # fmt: skip
    """`inspect` shows the head. An engine that does not draft does not load it."""
    config = with_dspark(json.loads((tiny_path / "config.json").read_text()))
    weights = random_weights(config, seed=3)
    write_plain_checkpoint(tmp_path, config, weights)
    count = sum(name.startswith("mtp.") for name in weights)
    llm = LLM(tmp_path, device="cpu", activations="exact")
    assert f"ignoring {count} tensors mtp.*: the model runs without its draft" in caplog.text
    assert first_rank(llm._engine.executor).runner.model.draft_head is None
    assert len(first_rank(llm._engine.executor).runner.groups[0].fields[0].layers) == 4
    caplog.clear()
    drafting = LLM(tmp_path, device="cpu", activations="exact", draft_tokens=5)
    assert "ignoring" not in caplog.text
    wanted = llm.generate([[5, 6]], GREEDY)[0].outputs[0].token_ids
    assert drafting.generate([[5, 6]], GREEDY)[0].outputs[0].token_ids == wanted
    assert main(["inspect", str(tmp_path)]) == 0
    out = " ".join(capsys.readouterr().out.replace("│", "").split())
    assert "DSpark: blocks of 5 tokens in 3 stages, Markov rank 12, reads layers 1, 2, 3" in out
    assert "draft head: Markov head" in out and "of which the draft head" in out


def test_every_tensor_of_the_dspark_head_is_needed(tiny_path: Path, tmp_path: Path) -> None:
    config = with_dspark(json.loads((tiny_path / "config.json").read_text()))
    weights = random_weights(config, seed=3)
    write_plain_checkpoint(tmp_path, config, weights)
    checkpoint = Checkpoint.open(tmp_path)
    specs = weight_specs(config_of(checkpoint.config))
    head = [name for name in checkpoint.tensors if name.startswith("mtp.")]
    for name in head:
        kept = {other: info for other, info in checkpoint.tensors.items() if other != name}
        with pytest.raises(CheckpointError, match=re.escape(name)):
            WeightSource(replace(checkpoint, tensors=kept), specs)
    WeightSource(checkpoint, specs)
    assert len(head) == sum(name.startswith("mtp.") for name in specs) > 100


@pytest.mark.parametrize("wrong", [-1, 10**6])
def test_expert_ids_out_of_range(path: Path, wrong: int) -> None:
    """A -1 would mean "no expert" to the operators: it must not get there."""
    for file in sorted(path.glob("*.safetensors")):
        tensors = load_file(file)
        names = [name for name in tensors if name.endswith("tid2eid")]
        for name in names:
            tensors[name][5, 0] = wrong
        if names:
            save_file(tensors, file)
    with pytest.raises(CheckpointError, match=r"tid2eid holds expert ids from .* wanted 0 to"):
        LLM(path, device="cpu")


@pytest.mark.parametrize("ending", ["config.json", ".safetensors"])
def test_a_file_that_may_not_be_read(
    path: Path, monkeypatch: pytest.MonkeyPatch, ending: str
) -> None:
    open_file = Path.open

    def refuse(file: Path, *args: Any, **more: Any) -> Any:
        if file.name.endswith(ending):
            raise PermissionError(13, "Permission denied", str(file))
        return open_file(file, *args, **more)

    monkeypatch.setattr(Path, "open", refuse)
    with pytest.raises(CheckpointError, match=f"{ending} cannot be read: Permission denied"):
        LLM(path, device="cpu")


def test_limits_that_no_machine_can_serve(capsys: Capture) -> None:
    assert "must be at least 2" in fails(capsys, "generate", "hi", "--max-model-len", 1)
    memory = ("--cache-memory-bytes", 10**14, "--max-num-seqs", 10**6)
    message = fails(capsys, "generate", "hi", "--device", "cpu", *memory)
    assert re.search(r"would take [\d,]+ bytes, but this machine has [\d,]+ bytes", message)
