"""The architecture of zerogap as executable rules over its source text; `test_architecture.py` applies and tests them.

`check_tree(package)` reads every Python and C++ file under the package folder and returns its violations as
`(rule, "file:line: what")` pairs. Nothing is imported, so a file that does not even load is still judged.
docs/architecture.md is the prose of `LAYERS` and of the rules named in `RULES`.
"""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

# Lowest row first. A module imports its own package and strictly lower rows; packages of one row are strangers.
LAYERS: tuple[tuple[str, ...], ...] = (
    ("errors", "env", "numerics", "moments", "routing", "types", "config"),
    ("ops",),
    ("parallel",),
    ("layers",),
    ("models",),
    ("weights", "text"),
    ("rollout", "train"),
    ("rl", "diagnose"),
    ("verify", "cluster", "serve"),
    ("cli",),
    ("__init__", "__main__"),  # the public names of the package, gathered from all rows
)
BASE = LAYERS[0]  # single files that may import each other
TORCH_FREE = ("errors", "env", "numerics", "config")
RANK = {name: row for row, names in enumerate(LAYERS) for name in names}
COMPUTING = ("ops", "parallel")
SIMULATING = (
    "diagnose/simulate/",
    "diagnose/corpus/",
    "diagnose/adapters/",
)  # imitate the arithmetic of other stacks; no run uses their numbers
PURE_CALLS = ("layers", "models")  # parameters and op calls: not even elementwise maths

# Third-party modules and the only places (path prefixes inside the package) that may import them.
ONLY_IN: dict[str, tuple[str, ...]] = {
    "triton": ("ops/triton",),
    "ctypes": ("ops/",),
    "torch.distributed": ("parallel/",),
    "torch.utils.tensorboard": ("rl/", "cli/"),
    "tensorboard": ("rl/", "cli/"),
    "wandb": ("rl/",),
    "ray": ("cluster/",),
    "safetensors": ("weights/", "train/checkpoint", "rl/rollout_log", "diagnose/trace", "diagnose/source_weights"),
    "gguf": ("weights/", "text/"),
    "huggingface_hub": ("weights/", "text/"),
    "tokenizers": ("text/", "weights/"),  # a GGUF file carries its tokenizer
    "transformers": ("text/", "diagnose/", "verify/"),
    "vllm": ("diagnose/",),
    "datasets": ("rl/",),
    "math_verify": ("rl/",),
    "pyarrow": ("rl/", "diagnose/"),
    "reasoning_gym": ("rl/",),
    "pydantic": ("config", "serve/"),
    "yaml": ("config", "cli/"),
    "fastapi": ("serve/",),
    "uvicorn": ("serve/",),
    "typer": ("cli/",),
    "rich": ("cli/",),
}
NOWHERE = ("torch.optim", "torch.nn.functional", "torch.compile", "torch.jit", "torch.amp", "torch._dynamo")

RAW_ROOTS = {"torch", "F", "dist", "funcol", "nn", "np", "numpy"}
RAW_CALLS = {
    *("matmul", "mm", "bmm", "mv", "addmm", "addmv", "baddbmm", "einsum", "dot", "vdot", "inner", "outer", "tensordot"),
    *("linear", "bilinear", "conv1d", "softmax", "log_softmax", "logsumexp", "logaddexp", "rms_norm", "layer_norm"),
    *("norm", "vector_norm", "clip_grad_norm_", "get_total_norm", "scaled_dot_product_attention", "cross_entropy"),
    *("nll_loss", "embedding", "_scaled_mm", "multinomial", "all_reduce", "reduce_scatter", "reduce_scatter_tensor"),
    *("all_gather", "all_to_all", "compile", "autocast", "Linear", "Embedding", "RMSNorm", "LayerNorm"),
    *("MultiheadAttention", "AdamW", "Adam", "SGD"),
}
RAW_METHODS = {"softmax", "log_softmax", "logsumexp", "matmul", "mm", "bmm", "addmm", "baddbmm", "multinomial", "norm"}
ELEMENTWISE = {"exp", "log", "sqrt", "rsqrt", "sigmoid", "tanh", "silu", "relu", "gelu", "pow", "sum", "mean", "cumsum"}
GLOBAL_SWITCHES = {
    *("set_default_dtype", "set_default_device", "manual_seed", "use_deterministic_algorithms", "set_flush_denormal"),
    *("set_float32_matmul_precision", "set_deterministic_debug_mode", "set_num_interop_threads"),
}
VAGUE_NAMES = {"util", "utils", "common", "helper", "helpers", "misc"}
MAX_FILE, MAX_FUNCTION, MAX_KERNEL = 500, 80, 160
NATIVE_SUFFIXES = (".c", ".cc", ".cpp", ".h", ".hpp", ".cu", ".cuh")

RULES = {
    "unknown-package": "a module or package without a row in the layering",
    "layer": "an import of a higher row, or of another package in the same row",
    "torch-free": "row 0 (but for types) is importable without torch",
    "private-dependency": "a third-party module outside the package that owns it, or one that is used nowhere",
    "raw-maths": "maths on tensors outside ops/ and parallel/",
    "patch": "an assignment into somebody else's module",
    "global-switch": "a call that changes the results of code elsewhere in the process",
    "environment": "an environment read outside env.py",
    "guarded-import": "an import inside try or suppress",
    "bare-except": "an except without an exception class",
    "vague-name": "a file or folder that says nothing about what is in it",
    "docstring": "a module that does not say why it exists",
    "file-length": f"more than {MAX_FILE} lines",
    "function-length": f"more than {MAX_FUNCTION} lines (kernels: {MAX_KERNEL})",
}
Violation = tuple[str, str]


def dotted(node: ast.AST) -> list[str]:
    """`a.b.c` as ["a", "b", "c"]; empty when the root is not a plain name."""
    parts: list[str] = []
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    return [node.id, *reversed(parts)] if isinstance(node, ast.Name) else []


def _is_within(module: str, owner: str) -> bool:
    return module == owner or module.startswith(owner + ".")


class _PythonFile:
    """One module under judgement: its syntax tree, where it stands, and which names its imports bound."""

    def __init__(self, path: Path, package: Path) -> None:
        self.inside = path.relative_to(package).as_posix()  # ops/cpu/gemm.py
        self.place = self.inside.removesuffix(".py").split("/")[0]  # ops
        self.package = package.name
        self.text = path.read_text(encoding="utf-8")
        self.tree = ast.parse(self.text, filename=str(path))
        self.imports: list[tuple[ast.stmt, str]] = []
        self.foreign: set[str] = set()
        self.ours: set[str] = set()
        for node in ast.walk(self.tree):
            if isinstance(node, ast.Import):
                self._plain_import(node)
            elif isinstance(node, ast.ImportFrom):
                self._from_import(node)

    def _bind(self, module: str, name: str) -> None:
        (self.ours if module.split(".")[0] == self.package else self.foreign).add(name)

    def _plain_import(self, node: ast.Import) -> None:
        for alias in node.names:
            self.imports.append((node, alias.name))
            self._bind(alias.name, alias.asname or alias.name.split(".")[0])

    def _from_import(self, node: ast.ImportFrom) -> None:
        base = node.module or ""
        if node.level:  # relative: resolved from where the file stands
            folders = self.inside.split("/")
            base = ".".join([self.package, *folders[: len(folders) - node.level], *([base] if base else [])])
        for alias in node.names:
            self.imports.append((node, f"{base}.{alias.name}"))
            self._bind(base, alias.asname or alias.name)

    def at(self, node: ast.AST, message: str) -> str:
        return f"{self.inside}:{getattr(node, 'lineno', 1)}: {message}"


def _check_imports(file: _PythonFile) -> Iterator[Violation]:
    for node, module in file.imports:
        parts = module.split(".")
        if parts[0] == file.package:
            target = parts[1] if len(parts) > 1 else "__init__"
            target = target if target in RANK else "__init__"
            if target == file.place or (target in BASE and file.place in BASE):
                continue
            if RANK.get(file.place, len(LAYERS)) <= RANK[target]:
                yield "layer", file.at(node, f"{file.place} imports {target}")
            continue
        if file.place in TORCH_FREE and parts[0] == "torch":
            yield "torch-free", file.at(node, f"{module} in {file.inside}")
        for owner, places in ONLY_IN.items():
            if _is_within(module, owner) and not file.inside.startswith(places):
                yield "private-dependency", file.at(node, f"{module} is for {', '.join(places)}")
        for owner in NOWHERE:
            if _is_within(module, owner):
                yield "private-dependency", file.at(node, f"{module} is used nowhere")


def _check_maths(file: _PythonFile, node: ast.AST) -> Iterator[Violation]:
    if file.place in COMPUTING or file.inside.startswith(SIMULATING):
        return
    if isinstance(node, ast.BinOp | ast.AugAssign) and isinstance(node.op, ast.MatMult):
        yield "raw-maths", file.at(node, "operator @")
    if not isinstance(node, ast.Call):
        return
    name = dotted(node.func)
    method = node.func.attr if isinstance(node.func, ast.Attribute) else ""
    spelled = ".".join(name) or f"(...).{method}"
    calls, methods = RAW_CALLS, RAW_METHODS
    if file.place in PURE_CALLS:
        calls, methods = RAW_CALLS | ELEMENTWISE, RAW_METHODS | ELEMENTWISE
    rooted = len(name) > 1 and name[0] in RAW_ROOTS and name[-1] in calls  # torch.matmul(...)
    imported = len(name) == 1 and name[0] in calls and name[0] in file.foreign  # from torch import matmul
    of_value = method in methods and not (name and name[0] in file.ours | {"math"})  # logits.softmax(-1)
    if rooted or imported or of_value:
        yield "raw-maths", file.at(node, spelled)


def _check_reach(file: _PythonFile, node: ast.AST) -> Iterator[Violation]:
    """Patches of foreign modules, global switches and environment reads."""
    targets = node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AugAssign) else []
    for target in targets:
        name = dotted(target)
        if len(name) > 1 and name[0] in file.foreign:
            yield "patch", file.at(node, ".".join(name) + " = ...")
    if isinstance(node, ast.Call):
        name = dotted(node.func)
        if name == ["setattr"] and node.args and set(dotted(node.args[0])[:1]) & file.foreign:
            yield "patch", file.at(node, f"setattr({'.'.join(dotted(node.args[0]))}, ...)")
        if name and name[0] in file.foreign and name[-1] in GLOBAL_SWITCHES:
            yield "global-switch", file.at(node, ".".join(name))
    if file.place != "env":
        if (
            isinstance(node, ast.Attribute)
            and dotted(node)[:1] == ["os"]
            and node.attr in ("environ", "getenv", "putenv")
        ):
            yield "environment", file.at(node, ".".join(dotted(node)))
        if isinstance(node, ast.ImportFrom) and node.module == "os":
            for alias in node.names:
                if alias.name in ("environ", "getenv", "putenv"):
                    yield "environment", file.at(node, f"from os import {alias.name}")


def _check_statements(file: _PythonFile, node: ast.AST) -> Iterator[Violation]:
    guards = isinstance(node, ast.Try)
    if isinstance(node, ast.With):
        guards = any("suppress" in dotted(getattr(item.context_expr, "func", item)) for item in node.items)
    if guards:
        for inner in (inner for statement in node.body for inner in ast.walk(statement)):
            if isinstance(inner, ast.Import | ast.ImportFrom):
                yield "guarded-import", file.at(inner, "import under a guard")
    if isinstance(node, ast.ExceptHandler) and node.type is None:
        yield "bare-except", file.at(node, "except without a class")
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        length = (node.end_lineno or node.lineno) - node.lineno + 1
        kernel = any("jit" in dotted(getattr(mark, "func", mark))[-1:] for mark in node.decorator_list)
        limit = MAX_KERNEL if kernel else MAX_FUNCTION
        if length > limit:
            yield "function-length", file.at(node, f"{node.name} has {length} lines (at most {limit})")


def check_python(path: Path, package: Path) -> list[Violation]:
    """Violations of one Python file of the package folder `package`."""
    file = _PythonFile(path, package)
    found = list(_check_imports(file))
    for node in ast.walk(file.tree):
        found += [*_check_maths(file, node), *_check_reach(file, node), *_check_statements(file, node)]
    if file.place not in RANK:
        found.append(("unknown-package", f"{file.inside}: {file.place} has no row"))
    if file.text.strip() and not ast.get_docstring(file.tree):
        found.append(("docstring", f"{file.inside}: no module docstring"))
    return found


def native_functions(text: str) -> Iterator[tuple[int, int, str]]:
    """(first line, last line, head) of each C++ function body: a brace after `)` that is not inside another one.

    Comments, strings, character literals and preprocessor lines are blanked first, so that their braces do not count.
    """

    def blank(match: re.Match) -> str:
        return re.sub(r"[^\n]", " ", match.group(0))

    literals = r'//[^\n]*|/\*.*?\*/|"(?:\\.|[^"\\\n])*"|\'(?:\\.|[^\'\\\n])+\''
    text = re.sub(literals, blank, text, flags=re.DOTALL)
    text = re.sub(r"^[ \t]*#(?:[^\n]*\\\n)*[^\n]*", blank, text, flags=re.MULTILINE)
    opens: list[tuple[bool, int, str]] = []  # (is a function, first line, head) of every open brace
    head_start = 0
    for match in re.finditer(r"[{};]", text):
        mark, place = match.group(0), match.start()
        if mark == "{":
            raw = text[head_start:place]
            head = " ".join(raw.split())
            inside = any(is_function for is_function, _, _ in opens)
            tail = re.search(r"\)\s*(const|noexcept|override|mutable|->[^{}]*|:[^{}]*)*$", head)
            is_function = bool(tail) and not inside
            first = text.count("\n", 0, head_start + len(raw) - len(raw.lstrip())) + 1
            opens.append((is_function, first, head))
        elif mark == "}" and opens:
            is_function, first, head = opens.pop()
            if is_function:
                yield first, text.count("\n", 0, place) + 1, head
        head_start = match.end()


def check_tree(package: Path) -> list[Violation]:
    """Violations of every Python and native source file under the package folder."""
    found: list[Violation] = []
    for path in sorted(p for p in package.rglob("*") if p.is_file() and "__pycache__" not in p.parts):
        inside = path.relative_to(package).as_posix()
        vague = VAGUE_NAMES & {part.split(".")[0] for part in inside.split("/")}
        if vague and (path.suffix == ".py" or path.suffix in NATIVE_SUFFIXES):
            found.append(("vague-name", f"{inside}: {vague.pop()}"))
        if path.suffix == ".py":
            found += check_python(path, package)
        elif path.suffix in NATIVE_SUFFIXES:
            for first, last, head in native_functions(path.read_text(encoding="utf-8")):
                if last - first + 1 > MAX_KERNEL:
                    found.append(("function-length", f"{inside}:{first}: {head[:60]} has {last - first + 1} lines"))
        if path.suffix == ".py" or path.suffix in NATIVE_SUFFIXES:
            found += check_length(path, inside)
    return found


def check_length(path: Path, shown: str) -> list[Violation]:
    """The file-length rule alone, also for tests, benchmarks and examples."""
    lines = path.read_text(encoding="utf-8").count("\n")
    return [("file-length", f"{shown}: {lines} lines (at most {MAX_FILE})")] if lines > MAX_FILE else []
