"""A formula as the source of a kernel, for one back end each."""
