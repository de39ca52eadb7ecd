"""The commands as an operator runs them: programs with arguments, output and an exit status."""

import asyncio
import json
import os
import sys
from pathlib import Path
from typing import Any


class Cli:
    """Runs ``pdq`` with the servers' addresses in a state directory, as ``pdq up`` leaves it."""

    def __init__(self, state_dir: Path) -> None:
        self.state_dir = state_dir

    async def start(self, *arguments: str, **environ: str) -> asyncio.subprocess.Process:
        inherited = {name: value for name, value in os.environ.items() if not name.startswith("PDQ_")}
        return await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "pdq.cli", *arguments),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            cwd=self.state_dir.parent,
            env={**inherited, "PDQ_STATE_DIR": str(self.state_dir), **environ},
        )

    async def run(self, *arguments: str, **environ: str) -> tuple[int | None, str, str]:
        return await finish(await self.start(*arguments, **environ))

    async def json(self, *arguments: str) -> Any:
        status, out, err = await self.run(*arguments, "--json")
        assert (status, err) == (0, "")
        return json.loads(out)


async def finish(program: asyncio.subprocess.Process, text: str = "") -> tuple[int | None, str, str]:
    async with asyncio.timeout(60):
        out, err = await program.communicate(text.encode())
    return program.returncode, out.decode(), err.decode()
