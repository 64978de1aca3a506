"""From a public function to a kernel: checks, memory, autograd."""
