"""Every named case of a package once, on a GPU; for compute-sanitizer, which needs a plain process.

    compute-sanitizer --tool racecheck python tools/sanitize.py kda [PART OF A NAME]

Results are not looked at: that is what the tests are for.
"""

import argparse
import importlib
import sys

import torch


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("package", choices=("decode", "kda", "lightning"))
    parser.add_argument("part", nargs="?", default="", help="of the names of cases to run")
    options = parser.parse_args(argv)
    family = importlib.import_module(f"cula.{options.package}")
    cases = importlib.import_module(f"cula.{options.package}.cases")
    if not torch.cuda.is_available():
        print("there is no CUDA GPU here; nothing was run")
        return 0
    count = 0
    for name, case in cases.CASES.items():
        if options.part in name:
            call = getattr(family, getattr(case, "call", f"{options.package}_prefill"))
            try:
                call(**cases.make_inputs(case, "cuda"), backend="cute")
                count += 1
            except NotImplementedError as missing:
                print(f"{name}: {missing}")
    torch.cuda.synchronize()
    print(f"{count} cases ran")
    return 0 if count else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
