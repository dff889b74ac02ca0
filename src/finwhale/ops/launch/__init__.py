"""Early launch: a kernel starts while the kernel before it ends (programmatic dependent launch)."""

from typing import Any


def launch_options(early: bool) -> dict[str, Any]:
    """Keyword arguments of a kernel's launch; `early` needs Hopper or a later NVIDIA GPU.

    A kernel that starts early takes a constexpr PDL. If PDL is true, the kernel begins with
    gdc_launch_dependents and reads nothing that another kernel writes before gdc_wait. A kernel
    that calls gdc_wait before gdc_launch_dependents guarantees more: all writes of earlier kernels
    are visible when the next kernel starts. The experts' GEMMs rely on that when they read the
    order of the tokens.
    """
    return {"PDL": True, "launch_pdl": True} if early else {"PDL": False}
