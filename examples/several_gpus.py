"""Divides one model among several ranks: processes, each with a GPU of its own.

python examples/several_gpus.py [--ranks 2] [PATH]

Without PATH, it divides the embedded model. The embedded model is too narrow to divide its FP8
blocks, so an unquantised copy runs. Without GPUs the ranks are processes on the CPU: slower than
one rank, but the same code.
"""

import argparse
import shutil
import tempfile

import torch

from finwhale import LLM, SamplingParams
from finwhale.checkpoint.reader import Checkpoint
from finwhale.demo import DEMO_PATH
from finwhale.distributed.rank import Rank
from finwhale.models.registry import parse_config
from finwhale.models.weight_sources import CheckpointWeights
from finwhale.testing.tiny import write_plain_checkpoint


def copy_unquantised(directory: str) -> None:
    checkpoint = Checkpoint.open(DEMO_PATH)
    weights = CheckpointWeights(parse_config(checkpoint.config), checkpoint, None)
    stored = weights.open(torch.device("cpu"), Rank(0, 1))
    plain = (
        (spec.name, weight.dequantise(torch.float32))
        for spec, weight in stored.into({})
        if weight is not None
    )
    write_plain_checkpoint(directory, checkpoint.config, plain)
    for path in DEMO_PATH.glob("tokenizer*"):
        shutil.copy(path, directory)


parser = argparse.ArgumentParser(
    allow_abbrev=False, description="Continue a text with a model on several GPUs."
)
parser.add_argument("path", nargs="?", metavar="PATH", help="directory of a checkpoint")
parser.add_argument("--ranks", type=int, default=2, help="number of GPUs (default: 2)")
args = parser.parse_args()

with tempfile.TemporaryDirectory() as folder:
    if args.path is None:
        copy_unquantised(folder)
        llm = LLM(folder, tensor_parallel_size=args.ranks, activations="exact")
    else:
        llm = LLM(args.path, tensor_parallel_size=args.ranks)
    # The other ranks are fresh interpreters, so this script needs no `if __name__ == "__main__"`.
    print(llm)
    result = llm.generate("Once upon a time", SamplingParams(temperature=0, max_tokens=40))[0]
    print(result.outputs[0].text)
