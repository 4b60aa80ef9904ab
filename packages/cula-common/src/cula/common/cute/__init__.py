"""Device helpers shared by the kernels: plain Python that CuTe DSL traces. Imports cutlass."""
