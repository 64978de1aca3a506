"""From a public function to a kernel: one path for all operators, on one page in docs/authoring/calls.md.

signature.py   what is said of a kernel once; the rest is read from it
run.py         a call of a public function: at once in C++, else the general way, with its gradients
checks.py      what is wrong with a call
overlap.py     where an output may lie
forms.py       the definition and the kernel alone, called as the public function is
binding.py     the C++ that binds kernels to PyTorch
fast/          calls and nodes without PyTorch's dispatcher
"""
