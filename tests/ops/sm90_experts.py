"""Compile the routed experts' kernels for SM90 without a GPU: a script for test_sm90_experts.py.

As sm90_compile.py does; besides, it knows tensor descriptors and kernels in Gluon.
"""

import json
import re
import subprocess
import tempfile
from typing import Any

import torch
import triton
from sm90_compile import CUOBJDUMP, TARGET, TYPES, f32, meta, special
from torch import Tensor
from triton.compiler import ASTSource
from triton.experimental.gluon._runtime import GluonASTSource
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor as GluonDescriptor
from triton.runtime.jit import JITFunction
from triton.tools.tensor_descriptor import TensorDescriptor

from finwhale.ops.moe import ExpertWeight, hopper_experts, hopper_one, triton_fold, triton_order
from finwhale.ops.moe import triton_experts as kernels
from finwhale.ops.moe.hopper_experts import HopperPlan

ALL_TYPES = {**TYPES, torch.uint8: "*u8"}
# D, I, E, K.
MODELS = {"flash": (4096, 2048, 256, 6), "pro": (7168, 3072, 384, 6), "demo": (256, 128, 16, 4)}
# Every plan that plan() makes for Hopper, and one of those for other GPUs.
PLANS = (
    kernels.Plan(16, hopper=HopperPlan(1, (1, 4), (1, 4))),
    kernels.Plan(32, hopper=HopperPlan(1, (1, 6), (1, 6))),
    kernels.Plan(64, hopper=HopperPlan(1, (1, 3), (1, 4))),
    kernels.Plan(128, hopper=HopperPlan(4, (2, 4), (2, 4))),
    kernels.Plan(256, hopper=HopperPlan(2, (1, 4), (4, 4))),
    kernels.Plan(16, (128, 4, 8), (64, 4, 4)),
)
DONE: set[str] = set()


def descriptor_type(value: Any) -> str:
    element = ALL_TYPES[value.base.dtype][1:]
    layout = f",{value.layout!r}" if isinstance(value, GluonDescriptor) else ""
    return f"tensordesc<{element}{list(value.block_shape)}{layout}>"


def compile_launch(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
    names = [parameter.name for parameter in self.params]
    arguments = dict(zip(names, args, strict=False))
    arguments |= {name: value for name, value in kwargs.items() if name in names}
    options = {name: value for name, value in kwargs.items() if name not in names}
    signature, constants, attributes = {}, {}, {}
    for position, parameter in enumerate(self.params):
        name, value = parameter.name, arguments[parameter.name]
        if isinstance(value, TensorDescriptor | GluonDescriptor):
            signature[name] = descriptor_type(value)
        elif isinstance(value, Tensor):
            signature[name] = ALL_TYPES[value.dtype]
            attributes[(position,)] = [["tt.divisibility", 16]]
        elif parameter.is_constexpr or value is None or (special(parameter, value) and value == 1):
            signature[name] = "constexpr"
            constants[(position,)] = value
        elif isinstance(value, int):
            signature[name] = "i32" if value < 2**31 else "i64"
            if special(parameter, value) and value % 16 == 0:
                attributes[(position,)] = [["tt.divisibility", 16]]
        else:
            signature[name] = "fp32"
    key = f"{self.__module__} {self.__name__} {signature} {constants} {attributes} {options}"
    if key in DONE:
        return
    DONE.add(key)
    make_source = GluonASTSource if self.is_gluon() else ASTSource
    source = make_source(self, signature, constants, attributes)
    compiled = triton.compile(source, target=TARGET, options=options)
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        command = [CUOBJDUMP, "-res-usage", file.name]
        usage = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    report = {
        "kernel": self.__name__,
        "gluon": self.is_gluon(),
        "registers": int(re.findall(r"REG:(\d+)", usage)[0]),
        "spilled": int(re.findall(r"STACK:(\d+)", usage)[0]),
        "shared": compiled.metadata.shared,
        "signature": str(signature),
    }
    print(json.dumps(report), flush=True)


def u8(*shape: int) -> Tensor:
    return meta(*shape, dtype=torch.uint8)


def call(D: int, I: int, E: int, K: int, N: int, plan: kernels.Plan) -> None:  # noqa: E741
    w = ExpertWeight(u8(E, 2 * I, D // 2), u8(E, D, I // 2), True)
    w = ExpertWeight(w.w13, w.w2, True, u8(E, 2 * I, D // 32), u8(E, D, I // 32))
    folded, _ = triton_fold.finish(w)
    ids, weights = meta(N, K, dtype=torch.int32), f32(N, K)
    each = kernels._launch(meta(N, D), ids, weights, folded, 10.0, plan)
    kernels._sum(each, ids, meta(N, D), N)


def main() -> None:
    JITFunction.run = compile_launch
    # As on the GPU: no tensor here is on one.
    for module in (kernels, triton_order, hopper_experts, hopper_one):
        module.early_launch = lambda x, pays=True: {"PDL": pays, "launch_pdl": pays}
    for name, (D, I, E, K) in MODELS.items():  # noqa: E741
        for plan in PLANS:
            if plan.block_n > 64 and name == "demo":
                continue  # Flash's with fewer steps; they take longest to compile
            for N in (1, 8, 8192) if plan.block_n in (16, 256) else (1024,):
                call(D, I, E, K, N, plan)


if __name__ == "__main__":
    main()
