"""`python -m benchmarks`: run every benchmark of this folder, one after the other.

`benchmarks.fp8_accuracy` is not among them: it trains many models, which takes an hour, and is started by itself.
Neither is `benchmarks.small_moe`, which needs what `examples/small_moe.py` makes.
"""

import subprocess
import sys
from pathlib import Path

NOT_BENCHMARKS = {"__init__", "__main__", "record", "models", "small_moe"}


def main() -> None:
    names = sorted(p.stem for p in Path(__file__).parent.glob("*.py") if p.stem not in NOT_BENCHMARKS)
    for name in [n for n in names if n in sys.argv[1:] or len(sys.argv) == 1]:
        print(f"== {name}", flush=True)
        subprocess.run([sys.executable, "-m", f"benchmarks.{name}"], check=True)


if __name__ == "__main__":
    main()
