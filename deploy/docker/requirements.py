"""What each image installs before pdq itself, from pyproject.toml: requirements change rarely, and so their layer stays.

``control`` is everything but UCX, which only workers load and which weighs more than all the rest; ``worker`` is UCX;
``torch`` and ``kubernetes`` are the optional dependency groups of these names.
"""

import sys
import tomllib
from pathlib import Path


def requirements(part: str) -> list[str]:
    project = tomllib.loads(Path("pyproject.toml").read_text())["project"]
    dependencies: list[str] = project["dependencies"]
    match part:
        case "control":
            return [line for line in dependencies if not line.startswith("ucxx")]
        case "worker":
            return [line for line in dependencies if line.startswith("ucxx")]
        case _:
            group: list[str] = project["optional-dependencies"][part]
            return group


if __name__ == "__main__":
    print("\n".join(requirements(sys.argv[1])))
