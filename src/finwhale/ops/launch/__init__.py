"""How kernels are launched.

- early_launch: options for a kernel that starts while the kernel before it ends.
- early_launch_hopper: the instructions of such a kernel, for Gluon.
- arguments: checks of the tensors that a launch takes.
- sizes: the sizes at which the launch signatures of kernels change.
- streamed_loads: lets TMA loads leave the rest of the L2 cache alone.
"""
