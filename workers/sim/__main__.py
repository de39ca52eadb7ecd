"""``python -m workers.sim prefill|decode --model NAME``"""

import sys

from workers.serve import main
from workers.sim.engine import SimEngine

if __name__ == "__main__":
    sys.exit(
        main("sim", lambda model, _, settings, tokenizer: SimEngine(model, settings.engine, settings.sim, tokenizer))
    )
