"""Which machine this is: by boot id, because names lie (two containers may share one, one host may have several)."""

from functools import cache
from pathlib import Path


@cache
def boot_id() -> str:
    """The kernel's random id of this boot: equal for all processes and containers on one running kernel."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
