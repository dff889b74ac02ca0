"""bfloat16 on a CPU, dummy weights, and memory that does not grow with the square of a prompt."""

import subprocess
import sys
from pathlib import Path

import torch
from tests.support.stepping import Stepper

from finwhale import LLM, SamplingParams

GREEDY = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
TEXT = [7 * i % 251 + 5 for i in range(150)]


def streams_and_logits(llm: LLM) -> torch.Tensor:
    stepper = Stepper(llm._engine)
    return stepper.logits(stepper.read(TEXT, cuts=(37, 100)))


def test_bfloat16_on_a_cpu(tiny_path: Path) -> None:
    """A bfloat16 has 8 bits: most tokens stay within a few of their roundings, 2^-5 of the logits.

    A token whose experts or entries are chosen otherwise may lie further off.
    """
    exact = streams_and_logits(LLM(tiny_path, device="cpu", activations="exact"))
    found = streams_and_logits(LLM(tiny_path, device="cpu", dtype="bfloat16", activations="exact"))
    assert found.dtype == torch.float32 and found.isfinite().all()
    error = (found - exact).norm(dim=1) / exact.norm(dim=1)
    assert 0 < error.median() < 2**-5, error.median()


def test_dummy_weights_run_from_a_configuration_alone(tiny_path: Path, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text((tiny_path / "config.json").read_text())
    first, second = (
        LLM(tmp_path, load_format="dummy", device="cpu").generate([TEXT, TEXT[:3]], GREEDY)
        for _ in range(2)
    )
    tokens = [result.outputs[0].token_ids for result in first]
    assert [len(ids) for ids in tokens] == [4, 4]
    assert tokens == [result.outputs[0].token_ids for result in second]


PEAK = """
import resource, sys
from finwhale import LLM, SamplingParams
llm = LLM(sys.argv[1], device="cpu", max_num_seqs=1, max_num_batched_tokens=256)
def peak(length):
    prompt = [7 * i % 4000 + 40 for i in range(length)]
    (result,) = llm.generate([prompt], SamplingParams(max_tokens=1))
    assert result.error is None
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
peak(300)
print(peak(1000), peak(5000))
"""


def test_memory_grows_with_the_prompt_not_its_square(short_demo_path: Path) -> None:
    """A score for each pair of 5,000 tokens would take 95 MiB a head; chunks of 256 need little.

    The cache is allocated before, but its pages become resident as they are written: 5 MiB.
    """
    command = [sys.executable, "-c", PEAK, str(short_demo_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    short, long = map(int, done.stdout.split())
    assert long - short < 60 * 1024, (short, long)  # KiB on Linux
