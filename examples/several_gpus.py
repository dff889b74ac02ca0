"""Divides one model among several ranks: processes, each with a GPU of its own.

python examples/several_gpus.py [--ranks 2] [PATH]

Without PATH, it divides the embedded model, among 2 or 4 ranks. Without GPUs the ranks are
processes on the CPU: slower than one rank, but the same code.
"""

import argparse

from finwhale import LLM, SamplingParams

parser = argparse.ArgumentParser(
    allow_abbrev=False, description="Continue a text with a model on several GPUs."
)
parser.add_argument("path", nargs="?", metavar="PATH", help="directory of a checkpoint")
parser.add_argument("--ranks", type=int, default=2, help="number of GPUs (default: 2)")
args = parser.parse_args()

llm = LLM(args.path, tensor_parallel_size=args.ranks)
# The other ranks are fresh interpreters, so this script needs no `if __name__ == "__main__"`.
print(llm)
result = llm.generate("Once upon a time", SamplingParams(temperature=0, max_tokens=40))[0]
print(result.outputs[0].text)
