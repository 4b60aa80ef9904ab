"""CuTe DSL kernels, architecture-neutral (SIMT): importing this package imports cutlass. See DESIGN.md beside this file."""
