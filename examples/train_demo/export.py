"""Writes a trained state dict as an official checkpoint (FP8, FP4, BF16), and reads one back.

    python export.py --parts FOLDER [--out FOLDER]

joins the files that train.py wrote into the one that ships. Needs the finwhale package.
"""

from __future__ import annotations

import argparse
import json
import shutil
from pathlib import Path

import torch
from checkpoint_writer import write_checkpoint
from layout import official_tensors, training_state
from model import DemoConfig, DemoModel
from safetensors.torch import load_file, save_file
from torch import Tensor

from finwhale.checkpoint.formats import dequantise_fp4, dequantise_fp8_block
from finwhale.models.deepseek_v4.config_json import config_of
from finwhale.models.deepseek_v4.weights import weight_specs

RANK = 128  # o_lora_rank
DEMO = Path(__file__).parents[2] / "src/finwhale/demo"


def export(state: dict[str, Tensor], config: Path, out: Path, shard_bytes: int) -> None:
    raw = json.loads(config.read_text())
    specs = weight_specs(config_of(raw))
    write_checkpoint(out, raw, official_tensors(state), specs, max_shard_bytes=shard_bytes)


def dequantised(folder: Path) -> dict[str, Tensor]:
    """The training state dict of a checkpoint. Rounding it again changes nothing."""
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
    return training_state(tensors)


def load_shipped(folder: Path, dtype: torch.dtype) -> DemoModel:
    """The training model with a checkpoint's weights."""
    model = DemoModel(DemoConfig.load(folder / "config.json"), dtype)
    model.load_state_dict(dequantised(folder))
    return model


def started(folder: Path, wanted: dict[str, Tensor]) -> dict[str, Tensor]:
    """The weights of a checkpoint that fit a model of other sizes, by name and shape.

    Output groups may be split in two: each half has its own columns of wo_a, and wo_b adds both.
    The experts are left out unless there are as many.
    """
    found = {}
    for name, value in dequantised(folder).items():
        shape = wanted[name].shape if name in wanted else None
        if shape is not None and name.endswith("wo_a.weight") and value.shape != shape:
            parts = value.shape[1] // shape[1]
            blocks = value.unflatten(0, (-1, RANK)).unflatten(2, (parts, -1))
            value = blocks.transpose(1, 2).flatten(0, 2)
        elif shape is not None and name.endswith("wo_b.weight") and value.shape != shape:
            parts = shape[1] // value.shape[1]
            blocks = value.unflatten(1, (-1, 1, RANK)).expand(-1, -1, parts, -1)
            value = blocks.flatten(1)
        if value.shape == shape and not name.endswith("tid2eid"):
            found[name] = value
    return found


def join(parts: Path, out: Path) -> None:
    """Writes a checkpoint of several files as one file beside its config, and no other tensors.

    The tokenizer of `out` stays, and gets the model's context.
    """
    tensors: dict[str, Tensor] = {}
    for file in sorted(parts.glob("*.safetensors")):
        tensors |= {name: value.clone() for name, value in load_file(file).items()}
    for old in (*out.glob("*.safetensors"), *out.glob("*.safetensors.index.json")):
        old.unlink()
    save_file(tensors, out / "model.safetensors", metadata={"format": "pt"})
    shutil.copy(parts / "config.json", out / "config.json")
    context = json.loads((out / "config.json").read_text())["max_position_embeddings"]
    tokenizer = out / "tokenizer_config.json"
    if tokenizer.exists():
        options = json.loads(tokenizer.read_text()) | {"model_max_length": context}
        tokenizer.write_text(json.dumps(options, indent=2, ensure_ascii=False) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--parts", type=Path, required=True)
    parser.add_argument("--out", type=Path, default=DEMO)
    args = parser.parse_args()
    join(args.parts, args.out)


if __name__ == "__main__":
    main()
