"""CuTe DSL kernels for any GPU from sm_80 on (SIMT); DESIGN.md beside this file explains them."""
