"""Run small models on the CPU table and print whether their bits depend on steps or batches.

Started by test_cpu_libraries.py with the libraries' environment variables set.
"""

import json
import sys
import tempfile
from pathlib import Path

import threadpoolctl
import torch
from tests.support.stepping import Stepper
from tests.support.tiny import random_weights, tiny_config, write_plain_checkpoint

from finwhale import LLM
from finwhale.config import Activations
from finwhale.ops import cpu_gemm, cpu_math

LENGTH = 270
# Where chunks end: single tokens at the beginning and around each 128th, then three at a time up to
# the 60th token, and elsewhere 15.
SINGLE = [
    n
    for n in range(1, LENGTH)
    if n % 128 < 10 or n % 128 > 120 or n % 15 == 0 or (n < 60 and n % 3 == 0)
]


def keeps_bits(path: Path, seed: int, activations: Activations, dtype: torch.dtype) -> bool:
    """Whether chunks and batches give every token the bits that the whole text gives it."""
    config = tiny_config(seed)
    write_plain_checkpoint(path, config, random_weights(config, seed, dtype))
    stepper = Stepper(LLM(path, device="cpu", dtype="float32", activations=activations)._engine)
    draw = torch.Generator().manual_seed(seed)
    text = torch.randint(config["vocab_size"], (LENGTH,), generator=draw).tolist()
    whole = stepper.read(text)
    chunked = [stepper.read(text, cuts) for cuts in (SINGLE, range(128, LENGTH, 128))]
    sequences = [stepper.sequence(text[:count]) for count in (260, 7, 131)]
    together = stepper.step([(sequence, len(sequence.token_ids)) for sequence in sequences])
    logits = stepper.runner.model.compute_logits(whole[:40])
    return (
        all(torch.equal(found, whole) for found in chunked)
        and all(torch.equal(found, whole[: len(found)]) for found in together)
        and torch.equal(logits, stepper.logits(whole[:40]))
    )


def main() -> None:
    torch.set_num_threads(int(sys.argv[1]))
    with tempfile.TemporaryDirectory() as directory:
        kept = [
            keeps_bits(Path(directory) / "float32", 3, "exact", torch.float32),
            keeps_bits(Path(directory) / "bfloat16", 8, "as-trained", torch.bfloat16),
        ]
    blas = [
        library["architecture"]
        for library in threadpoolctl.threadpool_info()
        if library["internal_api"] == "openblas"
    ]
    print(
        json.dumps(
            {
                "kept": kept,
                "openblas": blas,
                "blas_keeps_bits": cpu_math.blas_keeps_bits(),
                "fbgemm_keeps_bits": cpu_gemm._rows_are_independent(),
                "aten": torch.backends.cpu.get_cpu_capability(),
            }
        )
    )


if __name__ == "__main__":
    main()
