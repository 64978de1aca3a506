"""The metal: kernels on raw pointers, and the build that compiles them at first use."""
