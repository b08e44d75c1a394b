"""Kernels in C++ for CPUs with AVX-512: compiled on first use, kept in the user's cache folder, called through ctypes."""
