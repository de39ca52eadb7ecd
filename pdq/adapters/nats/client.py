"""nats-py's client, changed where it does what nobody wants of a program that shall run for months."""

import logging
import random
from typing import Any, Final

import nats.errors
from nats.aio.client import Client
from nats.aio.client import Server as KnownServer

from pdq.adapters.nats import credentials
from pdq.core.errors import InvalidSettings

_STAYS: Final = ("stale connection", "permissions violation")
"""What nats-py does the right thing about: connects again at once, or goes on."""


class SentAway(nats.errors.Error):
    """What the server said before it closed the connection."""


class PatientClient(Client):
    """Never gives a server up that it was connected to.

    It sends nothing, no credentials above all, to a server that should speak TLS and does not: nats-py would, since it
    leaves it to the server's greeting whether a connection is encrypted. It reads no file of credentials before that is
    known to be whole. And it connects again after whatever the server said (the JWT ran out, there are too many
    connections): nats-py would stay closed for good, also when the file has been renewed, or there is room again.
    """

    demands_tls = False
    credentials = ""

    def _connect_command(self) -> bytes:
        if self.demands_tls and not self._server_info.get("tls_required"):
            raise nats.errors.SecureConnWantedError
        if self.credentials:
            try:
                credentials.check(self.credentials)
            except InvalidSettings as error:
                raise nats.errors.Error(str(error)) from error  # which it takes for a reason to try again
        return super()._connect_command()

    async def _process_err(self, err_msg: str) -> None:
        if any(kind in err_msg for kind in _STAYS):
            await super()._process_err(err_msg)
            return
        error = SentAway(err_msg.strip("'"))
        await self._error_cb(error)
        await self._process_op_err(error)


def worth_telling(record: logging.LogRecord) -> bool:
    """asyncio warns at the end of each TLS connection that nats-py set it up for plain TCP, which changes nothing."""
    return "eof_received() has no effect when using ssl" not in str(record.msg)


def next_server(servers: list[KnownServer], info: dict[str, Any]) -> tuple[KnownServer | None, float]:
    """The server with the fewest failed attempts, after a pause that grows to about a second."""
    server = min(servers, key=lambda known: known.reconnects)
    pause_s = min(0.05 * 2 ** min(server.reconnects, 5), 1.0) * random.uniform(0.5, 1.0)
    return server, pause_s
