"""The bus: token frames to requesters, small messages to workers, questions to both."""

from collections.abc import Awaitable, Callable
from typing import Protocol

from pdq.core.messages import AccountAnswer, Control, OutputAnswer, StatusAnswer, StatusQuestion, TokenFrame


class TokenBus(Protocol):
    """Token frames from workers to whoever asked, and small control messages. At most once: loss is the reader's
    to notice (``pdq.core.stream``) and to repair with ``Resend``."""

    async def send(self, reply_to: str, frame: TokenFrame) -> None:
        """Frames over the broker's message limit are split, in order."""

    async def receive(
        self,
        subject: str,
        on_frame: Callable[[TokenFrame], None],
        answer: Callable[[str], OutputAnswer] | None = None,
    ) -> "Subscription":
        """Calls ``on_frame`` for each frame on ``subject``, in order, on the loop. Messages that do not parse are
        counted and dropped. ``answer`` replies to ``OutputQuestion`` for a request id."""

    async def ask_output(self, reply_to: str, request_id: str, timeout_s: float) -> OutputAnswer | None:
        """Ask the owner of ``reply_to`` which tokens it has; None when nobody answers in time."""

    async def ask_account(self, worker: str, timeout_s: float) -> AccountAnswer | None:
        """Ask a worker what it holds now; None when it does not answer in time."""

    async def answer_account(self, worker: str, answer: Callable[[], AccountAnswer]) -> "Subscription":
        """Reply to ``AccountQuestion`` for ``worker``."""

    async def ask_status(self, question: StatusQuestion, timeout_s: float) -> StatusAnswer | None:
        """Ask what has become of a job; None when nobody answers in time."""

    async def answer_status(self, answer: Callable[[StatusQuestion], Awaitable[StatusAnswer]]) -> "Subscription":
        """Reply to ``StatusQuestion``. Of several who do, one is asked."""

    async def control(self, subject: str, message: Control) -> None: ...

    async def on_control(self, subject: str, handler: Callable[[Control], None]) -> "Subscription": ...


class Subscription(Protocol):
    async def close(self) -> None: ...
