"""A watchdog for a model that hangs: a call that runs and makes no progress. Independent of Ray."""

from __future__ import annotations

import sys
import traceback

from torchrl_llm_kl.service.replica._core import ScoringCore

#: Seconds without progress after which a call counts as hung, by default.
HANG_AFTER = 300.0


class Watchdog:
    """Tells whether a call of a core has made no progress for ``hang_after`` seconds.

    Long calls are no hang while the engine's ``progress()`` grows, nor is a core that waits.

    Args:
        core: its calls are watched.
        hang_after: seconds.
    """

    def __init__(self, core: ScoringCore, hang_after: float) -> None:
        self._core, self.hang_after = core, hang_after
        self._state: tuple[int, int] | None = None
        self._since = 0.0

    def hangs(self, now: float) -> bool:
        """Whether the call hangs; to be asked a few times within ``hang_after``, with the time of one clock in seconds."""
        running = self._core.running
        state = None if running is None else (running, self._progress())
        if state != self._state:
            self._state, self._since = state, now
        return state is not None and now - self._since >= self.hang_after

    def _progress(self) -> int:
        try:
            return self._core.engine.progress()
        except Exception:  # it cannot tell: no progress
            return -1


def stacks() -> str:
    """The stack of each thread of this process."""
    parts = [
        f"thread {thread}:\n{''.join(traceback.format_stack(frame))}" for thread, frame in sys._current_frames().items()
    ]
    return "\n".join(parts)
