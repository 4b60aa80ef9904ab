"""How long a new process waits for its first decode, once PyTorch is loaded.

Run as ``python -m bench.first_call kda_decode`` it is that new process: it imports torch, creates
the CUDA context, then times ``import cula.decode`` with one call, and prints seconds as JSON.
"""

import json
import statistics
import subprocess
import sys
import time

from bench.checkout import ROOT, use_sources_if_not_installed

PROCESSES = 2


def measure(op: str) -> float:
    """Time import and first call in new processes, after one that fills the compile cache.

    Args:
        op: "kda_decode" or "lightning_decode".

    Returns:
        Microseconds, the median of the processes after the first.

    Raises:
        RuntimeError: a process failed; holds the end of what it said.
    """
    seconds = [_in_new_process(op) for _ in range(1 + PROCESSES)][1:]
    return 1e6 * statistics.median(seconds)


def _in_new_process(op: str) -> float:
    command = [sys.executable, "-m", "bench.first_call", op]
    done = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False
    )
    if done.returncode != 0:
        raise RuntimeError(f"{op} in a new process: {done.stderr.strip()[-400:]}")
    return json.loads(done.stdout.splitlines()[-1])["seconds"]


def _be_the_process(op: str) -> float:
    import torch

    device = "cuda"
    q, k, v = (torch.randn(1, 1, 64, 128, device=device).bfloat16() for _ in range(3))
    g, beta = torch.randn_like(q), torch.rand(1, 1, 64, device=device)
    decay, A_log, dt_bias = (torch.rand(n, device=device) for n in (64, 64, 64 * 128))
    state, out = torch.randn(1, 64, 128, 128, device=device), torch.empty_like(v)
    decay.neg_()
    torch.cuda.synchronize()

    began = time.perf_counter()
    import cula.decode

    if op == "kda_decode":
        gate = {"A_log": A_log, "dt_bias": dt_bias, "lower_bound": -5.0}
        cula.decode.kda_decode(q, k, v, g, beta, state, **gate, out=out, backend="cute")
    else:
        cula.decode.lightning_decode(q, k, v, decay, state, out=out, backend="cute")
    torch.cuda.synchronize()
    return time.perf_counter() - began


if __name__ == "__main__":
    use_sources_if_not_installed()
    print(json.dumps({"seconds": _be_the_process(sys.argv[1])}))
