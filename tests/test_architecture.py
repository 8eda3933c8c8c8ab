"""The layering and the other rules of docs/architecture.md, applied to the source and shown able to fail."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.architecture_rules import (
    LAYERS,
    MAX_FILE,
    MAX_FUNCTION,
    MAX_KERNEL,
    ONLY_IN,
    RANK,
    RULES,
    TORCH_FREE,
    check_length,
    check_tree,
    native_functions,
)

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "src" / "zerogap"
LONG_BODY = "".join(f"    x{i} = {i}\n" for i in range(MAX_FUNCTION))
NATIVE_BODY = "".join(f"  x{i} = {i};  // {{ not a brace\n" for i in range(MAX_KERNEL))

# (rule, file, source): each must be the only rule that its file breaks.
PLANTS = [
    ("unknown-package", "fancy/thing.py", ""),
    ("layer", "ops/gemm.py", "from zerogap.layers import linear\n"),
    ("layer", "rollout/engine.py", "from zerogap.train import trainer\n"),
    ("layer", "rollout/engine.py", "from zerogap import train\n"),
    ("layer", "rollout/engine.py", "import zerogap.train.trainer\n"),
    ("layer", "train/trainer.py", "from ..rl import loop\n"),
    ("layer", "verify/ladder.py", "def f():\n    from zerogap.cli import app\n"),
    ("layer", "weights/load.py", "from zerogap import Trainer\n"),
    ("layer", "numerics.py", "import zerogap.ops\n"),
    ("torch-free", "config.py", "import torch\n"),
    ("torch-free", "numerics.py", "from torch import float32\n"),
    ("private-dependency", "ops/gemm.py", "import triton.language as tl\n"),
    ("private-dependency", "rl/loop.py", "from transformers import AutoModel\n"),
    ("private-dependency", "train/step.py", "from torch import distributed\n"),
    ("private-dependency", "rl/loop.py", "from rich.progress import Progress\n"),
    ("private-dependency", "ops/optim.py", "from torch.optim import AdamW\n"),
    ("private-dependency", "ops/activation.py", "from torch.nn import functional\n"),
    ("raw-maths", "models/decoder.py", "import torch\ny = torch.matmul(a, b)\n"),
    ("raw-maths", "layers/linear.py", "y = x @ w\n"),
    ("raw-maths", "rl/loss.py", "y = logits.log_softmax(-1)\n"),
    ("raw-maths", "diagnose/shares.py", "import torch\ny = torch.matmul(a, b)\n"),
    ("raw-maths", "rl/loss.py", "y = f(x)[0].logsumexp(-1)\n"),
    ("raw-maths", "rl/loss.py", "from torch import einsum\ny = einsum('i,i', a, b)\n"),
    ("raw-maths", "rollout/sampler.py", "import numpy as np\ny = np.dot(a, b)\n"),
    ("raw-maths", "train/trainer.py", "import torch\ny = torch.linalg.vector_norm(g)\n"),
    ("raw-maths", "train/trainer.py", "from torch import nn\nhead = nn.Linear(2, 2)\n"),
    ("raw-maths", "layers/norm.py", "y = x.rsqrt()\n"),
    ("raw-maths", "models/decoder.py", "y = x.sum(-1)\n"),
    ("patch", "rl/loop.py", "import torch\ntorch.add = None\n"),
    ("patch", "diagnose/adapters.py", "import json\nsetattr(json, 'dumps', print)\n"),
    ("patch", "train/trainer.py", "import torch\ntorch.backends.mkldnn.enabled = False\n"),
    ("global-switch", "train/trainer.py", "import torch\ntorch.use_deterministic_algorithms(True)\n"),
    ("global-switch", "rollout/sampler.py", "from torch import manual_seed\nmanual_seed(0)\n"),
    ("environment", "ops/gemm.py", "import os\nfast = os.environ.get('FAST')\n"),
    ("environment", "cli/app.py", "import os\nfast = os.getenv('FAST')\n"),
    ("environment", "rl/loop.py", "from os import environ\n"),
    ("guarded-import", "rl/data.py", "try:\n    import reasoning_gym\nexcept ImportError:\n    reasoning_gym = None\n"),
    ("guarded-import", "rl/data.py", "with contextlib.suppress(ImportError):\n    import reasoning_gym\n"),
    ("bare-except", "rl/data.py", "try:\n    f()\nexcept:\n    pass\n"),
    ("vague-name", "ops/utils.py", ""),
    ("vague-name", "ops/common/gemm.py", ""),
    ("vague-name", "ops/cpu/kernels/helpers.h", ""),
    ("docstring", "ops/norm.py", None),
    ("file-length", "ops/norm.py", "x = 1\n" * MAX_FILE),
    ("file-length", "ops/cpu/kernels/gemm.cpp", "int x;\n" * (MAX_FILE + 1)),
    ("function-length", "ops/norm.py", f"def f():\n{LONG_BODY}"),
    (
        "function-length",
        "ops/cpu/kernels/gemm.cpp",
        f"namespace a {{\nvoid f(int x) noexcept {{\n{NATIVE_BODY}}}\n}}\n",
    ),
]

# Lines that look alike and are legal.
LEGAL = {
    "ops/gemm.py": "import torch\ny = torch.matmul(a, b)\nz = a @ b\n",
    "ops/triton/gemm.py": "import triton\n@triton.jit\ndef f():\n" + LONG_BODY,
    "layers/linear.py": "from zerogap import ops\nfrom zerogap.numerics import Numerics\ny = ops.softmax(x)\n",
    "models/decoder.py": "import math\nscale = 1.0 / math.sqrt(64)\n",
    "rl/loss.py": "import torch\nratio = torch.exp(new - old)\ntotal = ratio.sum()\n",
    "rl/reward.py": "try:\n    module = importlib.import_module(path)\nexcept ImportError as error:\n    raise\n",
    "env.py": "import os\nx = os.environ.get('A')\n",
    "train/trainer.py": "class A:\n    def f(self):\n        self.total = 1\n",
    "ops/cpu/kernels/ok.cpp": f"struct A {{\n{'int x;' * 3}\n}};\nnamespace b {{\n" + "void f() { }\n" * 200 + "}\n",
    "__init__.py": "from zerogap.train.trainer import A\n",
}


def plant(package: Path, inside: str, source: str | None) -> None:
    path = package / inside
    path.parent.mkdir(parents=True, exist_ok=True)
    is_python = path.suffix == ".py"
    path.write_text("x = 1\n" if source is None else f'"""Says why."""\n{source}' if is_python else source)


def test_source_follows_every_rule():
    violations = check_tree(PACKAGE)
    assert not violations, "\n" + "\n".join(f"[{rule}] {what}" for rule, what in violations)


def test_files_beside_the_package_are_short_enough():
    folders = [ROOT / name for name in ("tests", "benchmarks", "examples")]
    paths = [p for folder in folders if folder.is_dir() for p in sorted(folder.rglob("*.py"))]
    violations = [v for p in paths for v in check_length(p, p.relative_to(ROOT).as_posix())]
    assert paths
    assert not violations, violations


def test_tests_mirror_the_package():
    known = {name for names in LAYERS for name in names} | {"parity", "e2e", "benchmarks", "__pycache__"}
    folders = {p.name for p in (ROOT / "tests").iterdir() if p.is_dir()}
    assert folders <= known, f"test folders without a package of that name: {sorted(folders - known)}"


@pytest.mark.parametrize(("rule", "inside", "source"), PLANTS, ids=[f"{r}-{i}" for i, (r, _, _) in enumerate(PLANTS)])
def test_each_rule_finds_its_planted_violation(rule, inside, source, tmp_path):
    package = tmp_path / "zerogap"
    plant(package, inside, source)
    found = check_tree(package)
    assert {r for r, _ in found} == {rule}, found
    assert all(what.startswith(inside) for _, what in found)


def test_every_rule_has_a_plant():
    assert {rule for rule, _, _ in PLANTS} == set(RULES)


@pytest.mark.parametrize("inside", LEGAL)
def test_lookalikes_are_legal(inside, tmp_path):
    package = tmp_path / "zerogap"
    plant(package, inside, LEGAL[inside])
    assert check_tree(package) == []


def test_native_functions_are_found_with_their_lines():
    text = (
        "#define OPEN {\n"
        'extern "C" {\n'
        "static inline int first(int a,\n"
        "                        int b) {\n"
        "  if (a) { return '{'; }\n"
        "  return b; /* } */ // }\n"
        "}\n"
        "template <int N> struct Tile { float at(int i) const { return x[i]; } };\n"
        "}\n"
    )
    assert [(first, last) for first, last, _ in native_functions(text)] == [(3, 7), (8, 8)]


def test_every_row_and_owner_names_something_that_is_or_is_planned():
    """A misspelt place in ONLY_IN would forbid a module everywhere without anyone noticing."""
    places = {place.split("/")[0] for owners in ONLY_IN.values() for place in owners}
    assert places <= set(RANK)


@pytest.mark.parametrize("module", [m for m in TORCH_FREE if (PACKAGE / f"{m}.py").exists()])
def test_row_zero_loads_without_torch(module):
    code = f"import sys, zerogap.{module}; sys.exit('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, f"zerogap.{module} imports torch\n{done.stderr}"
