"""Text and tokens."""

from collections.abc import Sequence
from typing import Protocol

from pdq.core.messages import ChatMessage


class Tokenizer(Protocol):
    """A model's tokenizer and chat template. Pure and fast; safe to call on the loop for prompts of normal size."""

    @property
    def vocab_size(self) -> int: ...
    @property
    def eos_token_ids(self) -> frozenset[int]: ...
    @property
    def digest(self) -> str: ...

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]: ...

    def decode(self, tokens: Sequence[int]) -> str:
        """Special tokens are left out."""

    def piece(self, token: int) -> str:
        """One token as text, for logprobs."""

    def render(self, messages: Sequence[ChatMessage]) -> str:
        """The chat template with the generation prompt.

        Raises:
            InvalidRequest: the template refuses these messages, or there is no template.
        """
