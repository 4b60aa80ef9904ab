"""The element types that configurations name (`cula.common.kernel_args.DTYPE_NAMES`)."""

from cutlass import BFloat16, Float16, Float32, Int32, Int64

DTYPES = {"bf16": BFloat16, "fp16": Float16, "fp32": Float32, "int32": Int32, "int64": Int64}
