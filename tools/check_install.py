"""Install built wheels as a user would, and check that they work alone, together and apart.

    python tools/check_install.py dist --constraints constraints.txt

Every environment starts empty, so the wheels' own metadata must bring all that they need. The
folder has to hold one wheel of each package.
"""

import argparse
import os
import subprocess
import sys
import tempfile
import textwrap
from pathlib import Path

PACKAGES = ("common", "kda", "lightning", "decode")

# What each package does for its user, on CPU tensors: the shortest real call.
SMOKE = {
    "common": """
        import torch
        from cula.common.testing import rel_error
        assert rel_error(torch.ones(3), torch.ones(3)) == 0
    """,
    "kda": """
        import torch
        from cula.kda import chunk_kda, kda_prefill
        q = k = v = g = torch.randn(1, 5, 2, 64)
        beta = torch.rand(1, 5, 2)
        out, state = chunk_kda(q, k, v, g, beta, use_gate_in_kernel=True, A_log=torch.zeros(2),
                               use_qk_l2norm_in_kernel=True, output_final_state=True)
        assert out.isfinite().all() and state.shape == (1, 2, 64, 64)
        out = kda_prefill(q, k, v, g, beta, A_log=torch.zeros(2))
        assert out.shape == v.shape and out.isfinite().all()
    """,
    "lightning": """
        import torch
        from cula.lightning import chunk_lightning_attn, lightning_prefill
        q = k = v = torch.randn(1, 5, 2, 64)
        out, state = chunk_lightning_attn(q, k, v, 0, 4, output_final_state=True)
        assert out.isfinite().all() and state.shape == (1, 2, 64, 64)
        out = lightning_prefill(q, k, v, torch.tensor([-0.1, -0.2]))
        assert out.shape == v.shape and out.isfinite().all()
    """,
    "decode": """
        import torch
        from cula.decode import kda_decode, lightning_decode
        q = k = v = g = torch.randn(3, 1, 2, 64)
        state = torch.zeros(4, 2, 64, 64)
        slots = torch.tensor([3, 0, 1], dtype=torch.int32)
        out = kda_decode(q, k, v, g, torch.rand(3, 1, 2), state, state_indices=slots,
                         A_log=torch.zeros(2))
        assert out.shape == v.shape and out.isfinite().all() and out.abs().sum() > 0
        out = lightning_decode(q, k, v, torch.tensor([-0.1, -0.2]), state, state_indices=slots)
        assert out.isfinite().all() and state[2].eq(0).all() and state[3].ne(0).any()
    """,
}


class Environment:
    """An empty virtual environment and the wheels it may install."""

    def __init__(self, home: Path, dist: Path, constraints: Path | None) -> None:
        self.home, self.dist = home, dist
        self.constraints = ("-c", str(constraints.resolve())) if constraints else ()
        self.python = home / "bin" / "python"
        subprocess.run([sys.executable, "-m", "venv", str(home)], check=True)

    def run(self, *args: str, ok: bool = True) -> str:
        """Run the environment's Python away from the sources, and return what it printed.

        ``ok=False`` demands that it fails.
        """
        variables = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "VIRTUAL_ENV")}
        done = subprocess.run(
            [str(self.python), *args], cwd=self.home, env=variables, capture_output=True, text=True
        )
        if (done.returncode == 0) is not ok:
            raise SystemExit(
                f"{' '.join(args)}\nexit {done.returncode}\n{done.stdout}{done.stderr}"
            )
        return done.stdout

    def pip(self, *args: str) -> str:
        """Run pip."""
        return self.run("-m", "pip", "--disable-pip-version-check", *args)

    def install(self, *packages: str) -> None:
        """Install packages by name from the folder of wheels, the rest from the index."""
        names = [f"cula-{package}" for package in packages]
        self.pip("install", "-q", "--find-links", str(self.dist), *self.constraints, *names)

    def holds(self) -> set[str]:
        """The cula packages installed here."""
        lines = self.pip("list", "--format=freeze").splitlines()
        return {line.split("==")[0].removeprefix("cula-") for line in lines if line[:5] == "cula-"}

    def works(self, package: str, ok: bool = True) -> None:
        """Run the package's smoke test; ``ok=False`` demands that it cannot be imported."""
        code = textwrap.dedent(SMOKE[package]) if ok else f"import cula.{package}"
        self.run("-c", code, ok=ok)


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description="Install built wheels and check them.")
    parser.add_argument("dist", type=Path, help="the folder of wheels")
    parser.add_argument("--constraints", type=Path, help="a pip constraints file")
    args = parser.parse_args()
    dist = args.dist.resolve()

    for package in PACKAGES:
        with tempfile.TemporaryDirectory() as home:
            alone = Environment(Path(home), dist, args.constraints)
            alone.install(package)
            expected = {"common", package}
            if alone.holds() != expected:
                raise SystemExit(f"cula-{package} brought {alone.holds()}; expected {expected}")
            alone.works(package)
            print(f"cula-{package}: alone in a fresh environment, works", flush=True)
            if package != PACKAGES[-1]:
                continue
            alone.install(*PACKAGES)
            for name in PACKAGES:
                alone.works(name)
            print("all four side by side: each works", flush=True)
            for gone in ("kda", "decode"):
                alone.pip("uninstall", "-q", "-y", f"cula-{gone}")
                alone.works(gone, ok=False)
                for name in alone.holds():
                    alone.works(name)
                print(f"cula-{gone} uninstalled: {sorted(alone.holds())} still work", flush=True)


if __name__ == "__main__":
    main()
