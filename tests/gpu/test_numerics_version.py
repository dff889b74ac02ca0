"""NUMERICS_VERSION is raised when the bits of rows change that a GPU caches."""

import torch
from tests.process.page_digests import OPTIONS, check, digest, wanted

from finwhale.ops.tables import optional


def test_cached_rows_have_the_bits_of_this_version() -> None:
    known = wanted("triton", *optional.packages(), torch.cuda.get_device_name())
    check({name: digest("cuda", **some) for name, some in OPTIONS["cuda"].items()}, known)
