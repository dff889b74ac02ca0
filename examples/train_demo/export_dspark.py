"""Writes a DSpark head in the official layout (FP8, FP4, BF16), and joins it with its base model.

    python export_dspark.py --base CHECKPOINT --head FOLDER --out FOLDER

writes a checkpoint that stands alone: the base model's tensors without its MTP layer, and the
head's dspark.safetensors, which train_dspark.py wrote. With --share, FOLDER of --out lies beside
the base model's and reads its tensors there; the base model's tensors and its MTP layer then are
two files.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
from pathlib import Path

import torch
from checkpoint_writer import encode
from dspark import DSparkConfig, DSparkHead, dspark_json
from export import dequantised
from layout import official_tensors
from model import DemoConfig
from safetensors.torch import load_file, save_file
from torch import Tensor

from finwhale.checkpoint.spec import WeightSpec
from finwhale.models.deepseek_v4.config_json import config_of
from finwhale.models.deepseek_v4.weights import weight_specs

BASE_FILE, MTP_FILE, HEAD_FILE = "base.safetensors", "mtp.safetensors", "dspark.safetensors"
INDEX_FILE = "model.safetensors.index.json"


def head_specs(base: dict[str, object], rank: int, features: int) -> dict[str, WeightSpec]:
    """The shape and stored format of every tensor of a head of a base model with an MTP layer.

    Args:
        rank: dspark_markov_rank.
        features: number of target layers.
    """
    config = config_of(base)
    D, V = config.hidden_size, config.vocab_size
    layer = {
        name: spec
        for name, spec in weight_specs(config).items()
        if re.match(r"mtp\.0\.(attn|ffn|attn_norm|ffn_norm|hc_attn|hc_ffn)[._]", name)
    }
    specs = {}
    for stage in range(3):
        for name, spec in layer.items():
            name = name.replace("mtp.0.", f"mtp.{stage}.")
            specs[name] = WeightSpec(name, spec.shape, spec.storage)
    plain = [
        WeightSpec("mtp.0.main_proj.weight", (D, features * D), "fp8_block"),
        WeightSpec("mtp.0.main_norm.weight", (D,), "bf16"),
        WeightSpec("mtp.2.norm.weight", (D,), "bf16"),
        WeightSpec("mtp.2.hc_head_fn", (config.hc_mult, config.hc_mult * D), "f32"),
        WeightSpec("mtp.2.hc_head_base", (config.hc_mult,), "f32"),
        WeightSpec("mtp.2.hc_head_scale", (1,), "f32"),
        WeightSpec("mtp.2.markov_head.markov_w1.weight", (V, rank), "bf16"),
        WeightSpec("mtp.2.markov_head.markov_w2.weight", (V, rank), "bf16"),
        WeightSpec("mtp.2.confidence_head.proj.weight", (1, D + rank), "bf16"),
    ]
    return specs | {spec.name: spec for spec in plain}


def export_head(state: dict[str, Tensor], base: Path, out: Path) -> None:
    """Write dspark.safetensors and config.json of a trained state dict."""
    raw = json.loads((base / "config.json").read_text())
    config = dspark_json(raw)
    specs = head_specs(raw, config["dspark_markov_rank"], len(config["dspark_target_layer_ids"]))
    stored: dict[str, Tensor] = {}
    missing = dict(specs)
    for name, value in official_tensors(state):
        spec = missing.pop(name)
        assert spec.shape == tuple(value.shape), name
        weight = encode(spec, value)
        stored[spec.name] = weight.data.clone()
        if weight.scale is not None:
            stored[spec.scale_name] = weight.scale
    assert not missing, list(missing)[:3]
    save_file(stored, out / f"{HEAD_FILE}.new", metadata={"format": "pt"})
    (out / f"{HEAD_FILE}.new").replace(out / HEAD_FILE)
    (out / "config.json").write_text(json.dumps(config, indent=2) + "\n")


def load_head(folder: Path, dtype: torch.dtype) -> DSparkHead:
    """The training head with a checkpoint's weights."""
    tensors = {k: v for k, v in dequantised(folder).items() if k.startswith("mtp.")}
    head = DSparkHead(
        DemoConfig.load(folder / "config.json"), DSparkConfig.load(folder / "config.json"), dtype
    )
    head.load_state_dict(tensors)
    return head


def join(base: Path, head: Path, out: Path) -> None:
    """Write a checkpoint that stands alone: base.safetensors, dspark.safetensors, their index."""
    out.mkdir(parents=True, exist_ok=True)
    tensors, _ = split(base)
    save_file(tensors, out / BASE_FILE, metadata={"format": "pt"})
    add_head(base, head, out, dict.fromkeys(tensors, BASE_FILE))


def share(base: Path, head: Path, out: Path) -> None:
    """Write a checkpoint in a directory beside the base model's, and let it read that one's file.

    The base model's directory then holds base.safetensors and mtp.safetensors.
    """
    if base.resolve().parent != out.resolve().parent:
        raise SystemExit(f"{out} must lie beside {base}")
    out.mkdir(parents=True, exist_ok=True)
    tensors, mtp = split(base)
    for file in base.glob("*.safetensors"):
        file.unlink()
    save_file(tensors, base / BASE_FILE, metadata={"format": "pt"})
    save_file(mtp, base / MTP_FILE, metadata={"format": "pt"})
    write_index(base, dict.fromkeys(tensors, BASE_FILE) | dict.fromkeys(mtp, MTP_FILE))
    add_head(base, head, out, dict.fromkeys(tensors, f"../{base.resolve().name}/{BASE_FILE}"))


def split(base: Path) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """The tensors of the model, and those of its MTP layer."""
    tensors: dict[str, Tensor] = {}
    for file in sorted(base.glob("*.safetensors")):
        tensors |= {name: value.clone() for name, value in load_file(file).items()}
    mtp = {name: tensors.pop(name) for name in list(tensors) if name.startswith("mtp.")}
    return tensors, mtp


def add_head(base: Path, head: Path, out: Path, names: dict[str, str]) -> None:
    """Put the head, its configuration, the tokenizer and the index beside the model's tensors."""
    shutil.copyfile(head / HEAD_FILE, out / HEAD_FILE)
    shutil.copyfile(head / "config.json", out / "config.json")
    for file in base.glob("tokenizer*.json"):
        shutil.copyfile(file, out / file.name)
    write_index(out, names | dict.fromkeys(load_file(out / HEAD_FILE), HEAD_FILE))


def write_index(out: Path, names: dict[str, str]) -> None:
    size = sum((out / file).stat().st_size for file in set(names.values()))
    index = {"metadata": {"total_size": size}, "weight_map": dict(sorted(names.items()))}
    (out / INDEX_FILE).write_text(json.dumps(index, indent=2) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--base", type=Path, required=True)
    parser.add_argument("--head", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--share", action="store_true", help="read the base model's own file")
    args = parser.parse_args()
    (share if args.share else join)(args.base, args.head, args.out)


if __name__ == "__main__":
    main()
