"""How much memory this process holds, as the kernel counts it."""

from pathlib import Path

STATUS = Path("/proc/self/status")
NAMES = {"VmRSS:": "memory/resident", "VmHWM:": "memory/peak"}


def process_memory(status: Path = STATUS) -> dict[str, float]:
    """`memory/resident` and `memory/peak` of this process in GiB (proc_pid_status(5)); empty without /proc."""
    if not status.is_file():
        return {}
    words = (line.split() for line in status.read_text(encoding="ascii", errors="replace").splitlines())
    return {NAMES[word[0]]: int(word[1]) / 2**20 for word in words if word and word[0] in NAMES}
