"""How many graphs torch's own compiler has made in this process; it is not imported for that."""

import sys


def compiled_graphs() -> int:
    utils = sys.modules.get("torch._dynamo.utils")
    return 0 if utils is None else int(utils.counters["stats"]["unique_graphs"])
