"""The only place that reads environment variables.

None of them may change a bit of any result within one backend class: the two here choose how many threads compute and,
for tests, which instruction set the native library is built for (which names another backend class, and is recorded).
"""

import os


def num_threads() -> int:
    """Threads for the native kernels: `ZEROGAP_NUM_THREADS`, else the cores this process may run on."""
    value = os.environ.get("ZEROGAP_NUM_THREADS")
    if value is None:
        return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else (os.cpu_count() or 1)
    if not (value.isascii() and value.isdigit()) or int(value) < 1:
        from zerogap.errors import ConfigError

        raise ConfigError("ZEROGAP_NUM_THREADS", value, "set it to a whole number of threads, 1 or more")
    return int(value)


def forced_isa() -> str | None:
    """Name of the instruction-set build to load instead of the best one (`ZEROGAP_ISA`), or None."""
    return os.environ.get("ZEROGAP_ISA")


def cache_dir() -> str:
    """Folder for downloaded models: `ZEROGAP_CACHE`, else `$XDG_CACHE_HOME/zerogap` or `~/.cache/zerogap`."""
    root = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    return os.environ.get("ZEROGAP_CACHE") or os.path.join(root, "zerogap")


def hub_offline() -> bool:
    """True if the user asked for no model-hub traffic (`HF_HUB_OFFLINE`)."""
    return os.environ.get("HF_HUB_OFFLINE", "0") not in ("", "0", "false")
