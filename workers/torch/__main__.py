"""``python -m workers.torch prefill|decode --model NAME --directory DIR``"""

import sys
from pathlib import Path

from pdq.core.errors import InvalidSettings
from pdq.core.settings import Settings
from pdq.ports import Tokenizer
from workers.serve import main
from workers.torch.engine import TorchEngine


def load(model: str, directory: Path | None, settings: Settings, _: Tokenizer) -> TorchEngine:
    if directory is None:
        raise InvalidSettings(f"the torch engine needs --directory, the files of {model}")
    return TorchEngine.load(directory, settings.engine)


if __name__ == "__main__":
    sys.exit(main("torch", load))
