"""A project's kernels in Ascend C: written from its formula, emulated here, bound to PyTorch where CANN is."""
