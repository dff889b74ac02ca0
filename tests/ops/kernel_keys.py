"""What Triton finds each kernel by: a script that test_kernel_sources.py runs.

Takes "forward" or "backward", the order in which kernels are met. Prints a JSON object: by kernel,
its key without the arguments' part.
"""

import importlib
import json
import pkgutil
import sys

from triton.runtime.jit import JITFunction

import finwhale.ops


def main(order: str) -> None:
    found = {}
    for module in pkgutil.walk_packages(finwhale.ops.__path__, "finwhale.ops."):
        try:
            members = vars(importlib.import_module(module.name))
        except ImportError:
            continue  # of an optional package
        for name, value in members.items():
            if isinstance(value, JITFunction) and value.__module__ == module.name:
                found[f"{module.name}.{name}"] = value
    kernels = sorted(found, reverse=order == "backward")
    # Functions that kernels share are met in them.
    kernels = [name for name in kernels if name.endswith("_kernel")]
    print(json.dumps({name: found[name].cache_key for name in kernels}))


if __name__ == "__main__":
    main(sys.argv[1])
