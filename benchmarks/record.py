"""Where results go, and what every result says about its circumstances."""

import argparse
import datetime
import json
import platform
import statistics
import subprocess
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from time import perf_counter
from typing import Any

import torch

RESULTS = Path(__file__).parent / "results"


def parser(text: str) -> argparse.ArgumentParser:
    """A command line with the options that every benchmark has."""
    made = argparse.ArgumentParser(description=text)
    made.add_argument("--model", help="model folder or .gguf file; default: the quick-start model")
    made.add_argument("--repeats", type=int, default=3, help="interleaved repetitions; medians are reported")
    return made


def median_seconds(arms: Mapping[str, Callable[[], Any]], repeats: int) -> dict[str, float]:
    """Median wall time of each arm; one untimed call each, then the arms take turns `repeats` times."""
    seconds: dict[str, list[float]] = {name: [] for name in arms}
    for call in arms.values():
        call()
    for _ in range(repeats):
        for name, call in arms.items():
            began = perf_counter()
            call()
            seconds[name].append(perf_counter() - began)
    return {name: statistics.median(values) for name, values in seconds.items()}


def cpu_name() -> str:
    """The processor's name with its core count."""
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return f"{names[0] if names else platform.processor()} x{len(names) or 1}"


def commit() -> str:
    """Short name of the commit that is checked out."""
    git = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    return git.stdout.strip() or "unknown"


def write(name: str, rows: Sequence[Mapping[str, Any]], **facts: Any) -> Path:
    """Write `results/NAME-DATE.json`: rows, facts, commit, versions, hardware."""
    from zerogap.ops.cpu import library

    content = {
        "benchmark": name,
        "date": datetime.date.today().isoformat(),
        "commit": commit(),
        "hardware": cpu_name(),
        "threads": library.num_threads(),
        "backend": library.backend(),
        "torch": torch.__version__,
        **facts,
        "rows": list(rows),
    }
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"{name}-{content['date']}.json"
    path.write_text(json.dumps(content, indent=1) + "\n")
    print(f"wrote {path}")
    return path
