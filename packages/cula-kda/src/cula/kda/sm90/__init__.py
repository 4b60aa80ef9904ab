"""Kernels of KDA prefill for Hopper. DESIGN.md says how they work."""
