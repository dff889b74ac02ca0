"""Writes a trained state dict as an official checkpoint (FP8, FP4, BF16), and reads one back
for evaluation.

    python export.py --state model.pt --out FOLDER [--shard-bytes N]

The tokenizer's files are copied beside it. Needs the finwhale package, whose checkpoint writer
does the quantising.
"""

from __future__ import annotations

import argparse
import json
import shutil
from pathlib import Path

import torch
from layout import official_tensors, training_state
from model import DemoConfig, DemoModel
from safetensors.torch import load_file
from torch import Tensor

from finwhale.checkpoint.formats import dequantise_fp4, dequantise_fp8_block
from finwhale.checkpoint.writer import write_checkpoint
from finwhale.models.deepseek_v4.config import ModelConfig
from finwhale.models.deepseek_v4.weights import weight_specs

DEMO = Path(__file__).parents[2] / "src/finwhale/demo"


def export(state: dict[str, Tensor], out: Path, shard_bytes: int) -> None:
    raw = json.loads((DEMO / "config.json").read_text())
    specs = weight_specs(ModelConfig.from_dict(raw))
    write_checkpoint(out, raw, official_tensors(state), specs, max_shard_bytes=shard_bytes)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        if out.resolve() != DEMO.resolve():
            shutil.copy(DEMO / name, out / name)


def load_shipped(folder: Path, dtype: torch.dtype) -> DemoModel:
    """The training model with a checkpoint's weights, dequantised. Rounding them again changes
    nothing."""
    stored: dict[str, Tensor] = {}
    for file in sorted(folder.glob("*.safetensors")):
        stored |= load_file(file)
    tensors = {}
    for name, value in stored.items():
        scale = (
            stored.get(name.removesuffix("weight") + "scale") if name.endswith("weight") else None
        )
        if name.endswith(".scale"):
            continue
        if value.dtype == torch.float8_e4m3fn and scale is not None:
            value = dequantise_fp8_block(value, scale, torch.float32)
        elif value.dtype == torch.int8 and scale is not None:
            value = dequantise_fp4(value, scale, torch.float32)
        tensors[name] = value if value.dtype == torch.int64 else value.float()
    model = DemoModel(DemoConfig.load(folder / "config.json"), dtype)
    model.load_state_dict(training_state(tensors))
    return model


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--state", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--shard-bytes", type=int, default=5_000_000_000)
    args = parser.parse_args()
    export(torch.load(args.state, map_location="cpu"), args.out, args.shard_bytes)


if __name__ == "__main__":
    main()
