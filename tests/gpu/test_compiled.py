"""The compiled mode on a GPU: a second process loads what the first compiled; the same tokens."""

import json
import os
import subprocess
import sys
import time
from itertools import chain
from pathlib import Path
from typing import Any

START = """
import json, sys
import torch
from finwhale import LLM, SamplingParams
from finwhale.models.step_inputs import Inline
from tests.support.stepping import Stepper
def refuse(*args, **kwargs):
    raise AssertionError("traced or compiled")
if sys.argv[2] == "second":
    torch.export.export = torch._inductor.standalone_compile = refuse
options = {"compile": True, "cache_dir": sys.argv[1]} if sys.argv[2] != "default" else {}
llm = LLM(device="cuda", max_num_seqs=8, max_model_len=2048, cache_memory_bytes=2**28, **options)
params = SamplingParams(temperature=0, max_tokens=32, ignore_eos=True)
prompts = ["Call me Ishmael.", "Once upon a time there was a little girl who", "The whale"]
tokens = [r.outputs[0].token_ids for r in llm.generate(prompts, params)]
runner, stepper = llm._engine.executor.runner, Stepper(llm._engine)
rank, builds = llm._engine.executor.description, llm._engine.executor.builds
late = sum(builds.late().values())
text = llm.encode(" ".join(prompts))
with torch.inference_mode():
    sequence = stepper.sequence(text)
    (streams,) = stepper.step([(sequence, len(text) - 1)])
    following = torch.tensor(text[1:], device="cuda")
    mtp = runner.model.draft_head
    draft = mtp(stepper.inputs, streams, following, runner.cache, Inline())
    drafts = mtp.compute_logits(draft).argmax(-1).tolist()
print(json.dumps([tokens, drafts, rank.compiled_layers, builds._counter.compiled, late]))
"""


def start(directory: Path, which: str) -> Any:
    # What torch's compiler keeps for itself is of this start alone.
    scratch = {"TORCHINDUCTOR_CACHE_DIR": f"{directory}-{which}"}
    begin = time.perf_counter()
    done = subprocess.run(
        [sys.executable, "-c", START, str(directory), which],
        capture_output=True,
        text=True,
        env={**os.environ, **scratch},
    )
    assert done.returncode == 0, done.stderr[-3000:]
    print(f"{which} start: {time.perf_counter() - begin:.1f} s")
    return json.loads(done.stdout.splitlines()[-1])


def test_a_second_start_loads_and_gives_the_same_tokens(tmp_path: Path) -> None:
    """On the model, its decodes captured, and on the MTP layer; the default mode's tokens."""
    first = start(tmp_path / "cache", "first")
    # The directory alone is what the second start has, wherever it lies.
    (tmp_path / "cache").rename(tmp_path / "moved")
    second = start(tmp_path / "moved", "second")
    assert first[2] > 0 and first[3] > 0 and first[4] == 0
    assert second[2:] == [0, 0, 0]
    assert first[:2] == second[:2]
    default = start(tmp_path / "moved", "default")
    pairs = zip(chain(*first[0]), chain(*default[0]), strict=True)
    same = sum(a == b for a, b in pairs)
    print(f"tokens of the default mode: {same} of 96")
    assert same >= 90
