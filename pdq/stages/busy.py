"""How long a worker has computed: the denominator of its measured speed.

Prompts that are computed side by side share the accelerator, so it is the time in which at least one was computed, however
many they were. Waiting for blocks is not computing.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager


class Busy:
    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._computing = 0
        self._since = 0.0
        self._before = 0.0
        self._prompts = 0

    @property
    def mean_s(self) -> float:
        """Of one prompt; 0 until there was one."""
        return self.seconds / max(1, self._prompts)

    @property
    def seconds(self) -> float:
        """Since the start, until now."""
        return self._before + (self._clock() - self._since if self._computing else 0.0)

    @contextmanager
    def computing(self) -> Iterator[None]:
        """One prompt is computed while this is open."""
        if not self._computing:
            self._since = self._clock()
        self._computing += 1
        self._prompts += 1
        try:
            yield
        finally:
            self._computing -= 1
            if not self._computing:
                self._before += self._clock() - self._since
