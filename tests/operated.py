"""A NATS server in operator mode, and everyone's papers there: JWTs in a chain from the operator over accounts to users.

A JWT of NATS is signed by an NKey (Ed25519) of who issues it; what it says beyond the registered claims is in ``nats``. See
github.com/nats-io/jwt for the claims, and ``creds_utils.go`` there for the file that a user gets.
"""

import base64
import json
import os
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import nkeys

from pdq.adapters.processes import Child, Server, _nats_binary, free_port

UNLIMITED = {"subs": -1, "data": -1, "payload": -1}
WITH_JETSTREAM = {"conn": -1, "leaf": -1, "mem_storage": -1, "disk_storage": -1, "streams": -1, "consumer": -1}


@dataclass
class Party:
    """An operator, an account or a user: a name and a key of that kind."""

    kind: str
    name: str
    seed: bytes = b""
    public: str = field(init=False)

    def __post_init__(self) -> None:
        prefix = getattr(nkeys, f"PREFIX_BYTE_{self.kind.upper()}")
        self.seed = self.seed or nkeys.encode_seed(os.urandom(32), prefix)
        self._key = nkeys.from_seed(bytearray(self.seed))
        self.public = self._key.public_key.decode()

    def issue(self, subject: "Party", expires_s: float | None = None, **claims: Any) -> str:
        """``subject``'s JWT, signed by this party."""
        now = int(time.time())
        body: dict[str, Any] = {"iat": now, "iss": self.public, "name": subject.name, "sub": subject.public}
        if expires_s is not None:
            body["exp"] = int(now + expires_s)
        body["nats"] = {**claims, "type": subject.kind, "version": 2}
        signed = f"{_encoded({'typ': 'JWT', 'alg': 'ed25519-nkey'})}.{_encoded(body)}"
        return f"{signed}.{_base64(self._key.sign(signed.encode()))}"


def _encoded(part: dict[str, Any]) -> str:
    return _base64(json.dumps(part).encode())


def _base64(data: bytes) -> str:
    return base64.urlsafe_b64encode(data).rstrip(b"=").decode()


def papers(jwt: str, seed: bytes) -> str:
    """A user's credentials as a file has them."""
    return (
        f"-----BEGIN NATS USER JWT-----\n{jwt}\n------END NATS USER JWT------\n\n"
        f"************************* IMPORTANT *************************\n\n"
        f"-----BEGIN USER NKEY SEED-----\n{seed.decode()}\n------END USER NKEY SEED------\n\n"
    )


def credentials(file: Path, account: Party, **claims: Any) -> Path:
    """The file of a new user of ``account``."""
    user = Party("user", file.stem)
    file.write_text(papers(account.issue(user, **UNLIMITED, **claims), user.seed))
    return file


class Operated:
    """The server, and the account with JetStream that it serves."""

    def __init__(self, directory: Path) -> None:
        directory.mkdir()
        operator, system = Party("operator", "operator"), Party("account", "system")
        self.account = Party("account", "pdq")
        served = {
            system.public: operator.issue(system, limits=UNLIMITED | {"conn": -1, "leaf": -1}),
            self.account.public: operator.issue(self.account, limits=UNLIMITED | WITH_JETSTREAM),
        }
        preload = "\n".join(f"{public}: {jwt}" for public, jwt in served.items())
        port = free_port()
        config = directory / "nats.conf"
        config.write_text(
            f'listen: "127.0.0.1:{port}"\nmax_payload: 8MB\njetstream {{ store_dir: "{directory}" }}\n'
            f"operator: {operator.issue(operator)}\nsystem_account: {system.public}\n"
            f"resolver: MEMORY\nresolver_preload {{\n{preload}\n}}\n"
        )
        child = Child("nats", [_nats_binary(), "--config", str(config)], directory / "log")
        self.server = Server("nats-server", directory, f"nats://127.0.0.1:{port}", child, port)
