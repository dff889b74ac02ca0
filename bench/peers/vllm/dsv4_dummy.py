"""A plugin of vLLM that fills DeepSeek-V4 with usable random weights for load_format="dummy".

With vLLM 0.26's own values, a measurement would mean nothing: the packed FP4 experts stay as they
were allocated, FP8 weights from +-1e-3 round to zero, E8M0 scales from negative numbers become NaN,
norms near zero send every token to the same experts, and the first layer lacks the tensor
hc_attn_fn_broadcast, which only load_weights makes.
"""

import math

import torch
from vllm.model_executor.model_loader.dummy_loader import DummyModelLoader


@torch.no_grad()
def fill(name, parameter, generator):
    leaf = name.rsplit(".", 1)[-1]
    data = parameter.data
    if data.dtype == torch.uint8:
        if leaf.endswith("weight_scale"):  # E8M0: weights get a standard deviation of 1/sqrt(K)
            data.fill_(119 if "w13" in leaf else 120)
        else:
            data.random_(0, 256, generator=generator)
    elif data.dtype == torch.float8_e8m0fnu:
        data.view(torch.uint8).fill_(121)  # 2^-6
    elif data.dtype == torch.float8_e4m3fn:
        values = torch.randn(
            data.shape, device=data.device, dtype=torch.bfloat16, generator=generator
        )
        data.copy_(values.to(data.dtype))
    elif leaf == "weight_scale_inv":
        data.fill_(2.0**-6)
    elif not torch.is_floating_point(data):
        return  # tid2eid has its values already
    elif "norm" in name and leaf == "weight":
        data.fill_(1.0)
    elif leaf in ("attn_sink", "e_score_correction_bias") or leaf.endswith("_base"):
        data.zero_()
    elif leaf.startswith("hc_") and leaf.endswith("_scale"):
        data.fill_(0.1)
    elif "embed" in name:
        data.normal_(0.0, 1.0, generator=generator)
    elif leaf != "ape" and data.dim() >= 2:
        data.normal_(0.0, 1.0 / math.sqrt(data.shape[-1]), generator=generator)
    else:
        data.normal_(0.0, 0.02, generator=generator)


def load_weights(loader, model, model_config):
    generator = None
    for name, parameter in model.named_parameters():
        if generator is None:
            generator = torch.Generator(device=parameter.device).manual_seed(1234)
        fill(name, parameter, generator)
    model.model.finalize_mhc_broadcast_weights()
    torch.cuda.synchronize()


def register():
    DummyModelLoader.load_weights = load_weights
