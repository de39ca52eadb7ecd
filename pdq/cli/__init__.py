"""The ``pdq`` command: each module is one command, ``app`` puts them together.

Nothing heavy is imported before a command needs it, so that ``pdq --help`` answers at once.
"""


def main() -> None:
    """Entry point of the ``pdq`` program."""
    from pdq.cli.app import run

    run()
