"""Our own kernels: forms of weights, and the CPU's matrix products and attention."""
