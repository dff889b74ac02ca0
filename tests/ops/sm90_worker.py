"""A process that compiles for SM90 or another GPU: conftest.py starts it, without TRITON_INTERPRET.

It reads requests: a JSON list of a module, the name of one of its CALLS, a mode and an
architecture: a number of NVIDIA's, or a name of AMD's. It answers each with a line about every
launch: what it compiles to, its kernel's name, or which of its indices may wrap. Or with the error.
"""

import importlib
import json
import sys
import traceback
from typing import Any

from triton.backends.compiler import GPUTarget
from triton.runtime.jit import JITFunction

from finwhale.ops.launch.streamed_loads import install_hook

from . import sm90_compile


def answer(module: str, call: str, mode: str, arch: int | str) -> dict[str, Any]:
    sm90_compile.mode = mode
    amd = isinstance(arch, str)
    sm90_compile.TARGET = GPUTarget("hip", arch, 64) if amd else GPUTarget("cuda", arch, 32)
    sm90_compile.FOUND.clear()
    try:
        importlib.import_module(f"{__package__}.{module}").CALLS[call]()
        sm90_compile.add_ranges()
    except Exception:
        return {"error": traceback.format_exc()}
    return {"reports": sm90_compile.FOUND}


def main() -> None:
    JITFunction.run = sm90_compile.compile_launch
    install_hook()
    for line in sys.stdin:
        print(json.dumps(answer(*json.loads(line))), flush=True)


if __name__ == "__main__":
    main()
