"""`finwhale validate` accepts the embedded model and finds what is wrong with damaged copies."""

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from tests.support.stepping import Stepper
from tests.support.tensors import read_tensors
from torch import Tensor

from finwhale import LLM
from finwhale.checkpoint.config_files import read_config
from finwhale.checkpoint.reader import Checkpoint
from finwhale.cli.main import main
from finwhale.demo import DEMO_PATH
from finwhale.number_formats import e2m1_values
from finwhale.ops.moe import EXPONENT_SPREAD
from finwhale.validation.expectations import expectations_of
from finwhale.validation.language import check_language, score
from finwhale.validation.report import Expectation
from finwhale.validation.weights import check_weights, count_far_values

Capture = pytest.CaptureFixture[str]
# Both ends of a mask's word; long enough for the sliding window and a compressed entry.
TEXTS = [([0], [31, 32, 0, 399, 5, 6]), ([0, 7, 8], [(7 * i + 3) % 400 for i in range(140)])]


def change(source: Path, target: Path, edit: Callable[[dict[str, Tensor]], None]) -> Path:
    """A copy of a checkpoint whose tensors `edit` changed."""
    shutil.copytree(source, target, ignore=shutil.ignore_patterns("*.safetensors*"))
    tensors = read_tensors(source)
    edit(tensors)
    save_file(tensors, target / "model.safetensors")
    return target


def report(capsys: Capture) -> dict[str, dict[str, str]]:
    checks: list[dict[str, str]] = json.loads(capsys.readouterr().out)["checks"]
    return {check["name"]: check for check in checks}


# --- Scores ---------------------------------------------------------------------------------------


@torch.inference_mode()
def test_scores_are_the_log_probabilities_of_one_prefill(llm: LLM) -> None:
    found = score(llm, TEXTS)
    stepper = Stepper(llm._engine)
    for scores, (prompt, ids) in zip(found, TEXTS, strict=True):
        logits = stepper.logits(stepper.read([*prompt, *ids]))
        wanted = logits.log_softmax(-1)[len(prompt) - 1 : -1].gather(-1, torch.tensor(ids)[:, None])
        torch.testing.assert_close(
            torch.from_numpy(scores), wanted[:, 0].double(), atol=1e-4, rtol=0
        )


def test_drafts_do_not_change_scores(llm: LLM, new_llm: Callable[..., LLM]) -> None:
    wanted = score(llm, TEXTS)
    for scores, plain in zip(score(new_llm(draft_tokens=2), TEXTS), wanted, strict=True):
        assert abs(scores - plain).max() < 1e-4


# --- Verdicts -------------------------------------------------------------------------------------


def test_the_demo_model_passes(one_thread: None, capsys: Capture) -> None:
    assert main(["validate", "--device", "cpu", "--json"]) == 0
    checks = report(capsys)
    verdicts = {name: check["verdict"] for name, check in checks.items()}
    # It takes Rome for the capital of Japan if it answers in JSON.
    assert verdicts.pop("chat: JSON schema") == "unusual"
    assert set(verdicts.values()) == {"ok", "skipped"}
    assert [name for name, verdict in verdicts.items() if verdict == "skipped"] == [
        "perplexity: Confucius",
        "perplexity: Python",
        "recall",
    ]
    assert "accepted drafts, position 3" in checks


def swap_nibbles(tensors: dict[str, Tensor]) -> None:
    """Read one layer's FP4 values in the wrong order. No statistic of the weights shows this."""
    for name in [n for n in tensors if n.startswith("layers.4.ffn.experts.") and "weight" in n]:
        codes = tensors[name].view(torch.uint8)
        tensors[name] = ((codes << 4) | (codes >> 4)).view(torch.int8)


def permute_rows(tensors: dict[str, Tensor]) -> None:
    """Permute the output rows of one layer's attention."""
    codes = tensors["layers.3.attn.wo_b.weight"].view(torch.uint8)
    order = torch.randperm(len(codes), generator=torch.Generator().manual_seed(0))
    tensors["layers.3.attn.wo_b.weight"] = codes[order].view(torch.float8_e4m3fn)


@pytest.mark.parametrize(
    "damage", [swap_nibbles, pytest.param(permute_rows, marks=pytest.mark.long)]
)
def test_one_damaged_layer_fails(
    damage: Callable[[dict[str, Tensor]], None], one_thread: None, tmp_path: Path
) -> None:
    path = change(DEMO_PATH, tmp_path / "damaged", damage)
    wanted = expectations_of(read_config(path))
    two = {name: wanted.perplexity[name] for name in ("Genesis", "Austen")}
    checks = check_language(LLM(path, device="cpu"), replace(wanted, perplexity=two))
    verdicts = {check.name: check.verdict for check in checks}
    assert verdicts["perplexity: Genesis"] == verdicts["perplexity: Austen"] == "failed"


def test_weights_that_are_not_finite_fail(
    tiny_path: Path, tmp_path: Path, one_thread: None, capsys: Capture
) -> None:
    def edit(tensors: dict[str, Tensor]) -> None:
        tensors["layers.1.ffn_norm.weight"][3] = torch.nan

    path = change(tiny_path, tmp_path / "nan", edit)
    assert main(["validate", str(path), "--device", "cpu", "--json"]) == 1
    checks = report(capsys)
    weights = checks["weights: tensors with NaN or infinity"]
    assert weights["verdict"] == "failed" and "layers.1.ffn_norm.weight" in weights["reason"]
    assert checks["loading"]["verdict"] == "failed"


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_logits_that_are_not_finite_fail(tiny_path: Path, tmp_path: Path, capsys: Capture) -> None:
    def edit(tensors: dict[str, Tensor]) -> None:
        tensors["norm.weight"].fill_(3e38)

    path = change(tiny_path, tmp_path / "infinite", edit)
    assert main(["validate", str(path), "--device", "cpu", "--json"]) == 1
    checks = report(capsys)
    assert checks["weights: tensors with NaN or infinity"]["verdict"] == "ok"
    assert checks["perplexity"]["verdict"] == "failed"
    assert "not finite" in checks["perplexity"]["found"]


def test_random_weights_fail(
    tiny_path: Path, one_thread: None, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("finwhale.validation.language.MAX_TOKENS", 40)
    options = ("--device", "cpu", "--draft-tokens", "0", "--recall-tokens", "128")
    assert main(["validate", str(tiny_path), *options]) == 1
    out = capsys.readouterr().out
    assert "failed" in out and "lm_eval" in out and "model card" in out


def test_options_without_an_effect_are_refused(capsys: Capture) -> None:
    assert main(["validate", "--load-format", "dummy"]) == 1
    assert main(["validate", "--recall-tokens", "1"]) == 1
    errors = capsys.readouterr().err
    assert "omit --load-format dummy" in errors and "recall_tokens must be at least" in errors


@pytest.mark.parametrize(
    ("value", "verdict"), [(3.0, "ok"), (3.3, "unusual"), (9.0, "failed"), (float("nan"), "failed")]
)
def test_an_expectation_has_two_limits(value: float, verdict: str) -> None:
    assert Expectation.measured(3.0, "").check("x", value).verdict == verdict


# --- Experts --------------------------------------------------------------------------------------


def test_far_values_are_those_beyond_the_spread_of_a_row() -> None:
    generator = torch.Generator().manual_seed(1)
    codes = torch.randint(0, 256, (6, 64), generator=generator, dtype=torch.uint8)
    exponents = torch.randint(100, 120, (6, 4), generator=generator, dtype=torch.uint8)
    codes[2, 16:32] = 0x80  # a group of zeros, which does not count
    exponents[2, 1] = 200
    values = e2m1_values(codes.device)
    wanted = 0
    for row in range(6):
        nibbles = [(int(byte) & 15, int(byte) >> 4) for byte in codes[row]]
        groups = [
            [float(values[code]) for pair in nibbles[16 * g : 16 * g + 16] for code in pair]
            for g in range(4)
        ]
        largest = max(int(exponents[row, g]) for g in range(4) if any(groups[g]))
        for g in range(4):
            if largest - int(exponents[row, g]) > EXPONENT_SPREAD:
                wanted += sum(value != 0 for value in groups[g])
    assert wanted > 0
    assert count_far_values(codes.view(torch.int8), exponents) == wanted


def test_experts_that_the_kernels_round_are_named(tmp_path: Path) -> None:
    def edit(tensors: dict[str, Tensor]) -> None:
        scale = tensors["layers.2.ffn.experts.5.w1.scale"].view(torch.uint8)
        scale[0, 0] = int(scale[0].max()) - EXPONENT_SPREAD - 1

    path = change(DEMO_PATH, tmp_path / "far", edit)
    finite, rounded = check_weights(Checkpoint.open(path))
    assert finite.verdict == "ok"
    assert rounded.found == "1 of 42" and rounded.verdict == "unusual"
    assert "layers.2: 1" in rounded.reason
