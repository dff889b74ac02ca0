"""Early launch: a kernel starts while the kernel before it ends (programmatic dependent launch)."""

from typing import Any


def launch_options(early: bool) -> dict[str, Any]:
    """Keyword arguments of a kernel's launch; `early` needs Hopper or a later NVIDIA GPU.

    A kernel that starts early takes a constexpr PDL. If PDL is true, every program of the kernel
    calls gdc_launch_dependents, usually first, and calls gdc_wait before it reads what another
    kernel of the step writes.

    - Before gdc_wait it may read weights and the inputs of the step: positions, sequences, token
      ids and page tables. Nothing of a step starts early until these are written: the embedding, an
      ordinary kernel, comes between.
    - A kernel that calls gdc_wait before gdc_launch_dependents guarantees more: all writes of
      earlier kernels are visible when the next kernel starts. The experts' GEMMs rely on that when
      they read the order of the tokens. One program that calls them in this order is enough, and
      the guarantee extends to all later kernels.
    - A kernel that has started early occupies registers and shared memory while it waits. So a
      kernel before a large one calls gdc_launch_dependents late, if kernels on a side stream should
      start first.
    """
    return {"PDL": True, "launch_pdl": True} if early else {"PDL": False}
