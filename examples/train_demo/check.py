"""Compares the training model with transformers' DeepSeek-V4: random weights, fp32, on the CPU.

    python check.py                       the architecture of config.json
    python check.py --sinkhorn            the Triton kernels of sinkhorn.py (on a GPU)

No sink, bias, ape or hc base is zero, and swiglu_limit is so small that it clamps values. The
checkpoint has official names, and transformers loads it by its own rules. transformers has no MTP
layer, so this does not check it.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import tempfile
from pathlib import Path
from typing import Any

import torch
from layout import official_tensors
from model import Batch, DemoConfig, DemoModel, Switches
from safetensors.torch import save_file
from sinkhorn import sinkhorn, sinkhorn_reference

CONFIG = Path(__file__).parent / "config.json"
TOLERANCE = 1e-4


def randomise(model: DemoModel) -> None:
    generator = torch.Generator().manual_seed(0)
    for name, p in [*model.named_parameters(), *model.named_buffers()]:
        if name.endswith("tid2eid"):
            choices = torch.rand(p.shape[0], model.config.n_routed_experts, generator=generator)
            p.data.copy_(choices.topk(p.shape[1], -1).indices)
        elif p.dim() == 1 or name.endswith("ape"):
            p.data.add_(torch.randn(p.shape, generator=generator) * 0.3)
        elif name.endswith(".fn"):
            p.data.copy_(torch.randn(p.shape, generator=generator) * 0.05)


def check_oracle(num_tokens: int) -> float:
    """Largest difference of the logits over the oracle's largest logit."""
    from transformers import DeepseekV4Config, DeepseekV4ForCausalLM  # noqa: PLC0415  (not on a GPU machine)

    torch.manual_seed(0)
    config = dataclasses.replace(DemoConfig.load(CONFIG), swiglu_limit=0.5, index_n_heads=32)
    model = DemoModel(config)
    randomise(model)
    values = json.loads(CONFIG.read_text()) | {
        "swiglu_limit": 0.5,
        "index_n_heads": 32,
        "torch_dtype": "float32",
    }
    del values["quantization_config"], values["expert_dtype"]
    tokens = torch.randint(0, config.vocab_size, (2, num_tokens))
    with tempfile.TemporaryDirectory() as folder:
        state = {
            k: v.contiguous().clone()
            for k, v in official_tensors(model.state_dict())
            if not k.startswith("mtp.")
        }
        save_file(state, Path(folder, "model.safetensors"), metadata={"format": "pt"})
        Path(folder, "config.json").write_text(json.dumps(values))
        loaded: Any = DeepseekV4ForCausalLM.from_pretrained(
            folder,
            config=DeepseekV4Config.from_pretrained(folder),
            dtype=torch.float32,
            attn_implementation="eager",
            output_loading_info=True,
        )
    oracle, info = loaded
    assert not info["missing_keys"] and not info["unexpected_keys"], info
    switches = Switches(torch.tensor(False), torch.tensor(True))
    with torch.no_grad():
        wanted = oracle.eval()(tokens).logits
        found = model.logits(
            model(Batch(tokens, torch.zeros_like(tokens, dtype=torch.int32)), switches).hidden
        )
    return float((found - wanted).abs().max() / wanted.abs().max())


def check_sinkhorn() -> float:
    """Largest difference of the kernel's output and gradient from autograd's, in fp64."""
    x = torch.rand(1000, 4, 4, device="cuda").add_(0.01).requires_grad_()
    dy = torch.randn(1000, 4, 4, device="cuda")
    (dx,) = torch.autograd.grad(sinkhorn(x, 20, 1e-6), x, dy)
    exact = x.detach().double().requires_grad_()
    y = sinkhorn_reference(exact, 20, 1e-6)
    (dx_exact,) = torch.autograd.grad(y, exact, dy.double())
    error_y = (sinkhorn(x, 20, 1e-6) - y).abs().max()
    return max(error_y.item(), ((dx - dx_exact).abs().max() / dx_exact.abs().max()).item())


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--sinkhorn", action="store_true")
    parser.add_argument("--num-tokens", type=int, default=512)
    args = parser.parse_args()
    error = check_sinkhorn() if args.sinkhorn else check_oracle(args.num_tokens)
    print(f"relative error {error:.2e}, tolerance {TOLERANCE:.0e}")
    if not error < TOLERANCE:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
