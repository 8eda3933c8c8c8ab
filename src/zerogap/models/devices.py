"""How much memory a device has: this machine's own, what a user says, or that of a named one for a plan."""

import os
import re
from pathlib import Path

from zerogap.errors import ConfigError

MIB, GIB = 2**20, 2**30
# Total memory as the driver reports it.
DEVICES = {
    "a100-40gb": 40960 * MIB,
    "a100-80gb": 81920 * MIB,
    "l40s-48gb": 46068 * MIB,
    "h100-80gb": 81559 * MIB,
    "h200-141gb": 143771 * MIB,
    "b200-180gb": 183359 * MIB,
}
RESERVED = {"cpu": 400 * MIB}
"""What a process takes besides a model: interpreter and libraries, about 330 MiB, and freed memory that malloc keeps,
64 MiB; measured. On a GPU a context and what libraries allocate; assumed."""
GPU_RESERVED = GIB
_PREFIXES = ("", "k", "m", "g", "t")
_UNITS = {f"{p}b": 10 ** (3 * i) for i, p in enumerate(_PREFIXES)} | {
    f"{p}ib": 2 ** (10 * i) for i, p in enumerate(_PREFIXES) if p
}
_CONTROL_GROUPS = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")


def device_memory(device: str, memory: str | None) -> int:
    """Bytes of one device.

    Args:
        device: `cpu` (what this machine lets a process have), or a key of `DEVICES`.
        memory: instead of what the device has: `24GB`, `22.5GiB`.

    Raises:
        ConfigError: no such device, or no size.
    """
    if device != "cpu" and device not in DEVICES:
        raise ConfigError("--device", device, f"choose cpu, {', '.join(DEVICES)}; or say how much with --memory")
    if memory is not None:
        return parse_size(memory)
    return machine_memory() if device == "cpu" else DEVICES[device]


def reserved(device: str) -> int:
    """Bytes that are taken before a model is loaded."""
    return RESERVED.get(device, GPU_RESERVED)


def parse_size(text: str) -> int:
    """Bytes of `24GB` (10^9 each), `24GiB` (2^30 each)."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*(b|[kmgt]i?b)", text.strip().lower())
    if found is None or not 0 < float(found[1]) < float("inf"):
        raise ConfigError("--memory", text, "write a size such as 24GB or 22.5GiB")
    return int(float(found[1]) * _UNITS[found[2]])


def machine_memory() -> int:
    """Memory that this machine has, or that a control group leaves it."""
    sizes = [os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")]
    for path in map(Path, _CONTROL_GROUPS):
        text = path.read_text().strip() if path.is_file() else ""
        if text.isdigit():
            sizes.append(int(text))
    return min(sizes)
