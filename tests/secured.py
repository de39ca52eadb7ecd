"""Servers as a careful operator runs them: TLS with client certificates, a user per role, the rules of SECURITY.md.

The embedded ``valkey-server`` is built without TLS, so its TLS is that of a proxy in front of it: pdq's side, which is what
is tested, sees no difference.
"""

import asyncio
import re
import ssl
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from pdq.adapters.processes import Child, Server, _nats_binary, _valkey_binary, free_port

DOCUMENT = Path(__file__).parents[1] / "SECURITY.md"
NATS_ROLES = ("reaper", "bridge", "prefill", "decode", "producer", "autoscaler", "operator")
REDIS_ROLES = ("reaper", "bridge", "worker", "autoscaler", "operator")
THROUGH_REDIS = {"PDQ_TRANSPORT_ORDER": "redis", "PDQ_TRANSPORT_WRITE_THROUGH": "redis"}
"""So that KV needs its rules, too."""


def password(server: str, role: str) -> str:
    """With characters that a URL, a shell or a log line could stumble over."""
    return f"{server}:{role}/p@ss%#1"


def block(language: str) -> str:
    """The code block of SECURITY.md in that language."""
    found = re.search(rf"^```{language}\n(.*?)^```", DOCUMENT.read_text(), re.DOTALL | re.MULTILINE)
    assert found, language
    return found[1]


class Authority:
    """A certificate authority with a server's and a client's certificate."""

    def __init__(self, directory: Path) -> None:
        directory.mkdir(parents=True)
        self._directory = directory
        self._openssl("req", "-x509", "-nodes", *self._new("ca"), "-subj", "/CN=test authority", "-days", "2")
        for name, usage in (("server", "serverAuth"), ("client", "clientAuth")):
            extensions = directory / f"{name}.ext"
            extensions.write_text(f"subjectAltName=IP:127.0.0.1\nextendedKeyUsage={usage}\n")
            self._openssl("req", "-nodes", *self._new(name, ".csr"), "-subj", f"/CN={name}")
            self._openssl(
                *("x509", "-req", "-in", f"{name}.csr", "-CA", "ca.pem", "-CAkey", "ca.key", "-CAcreateserial"),
                *("-days", "2", "-extfile", str(extensions), "-out", f"{name}.pem"),
            )

    def path(self, name: str) -> str:
        return str(self._directory / name)

    def server_context(self) -> ssl.SSLContext:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(self.path("server.pem"), self.path("server.key"))
        context.load_verify_locations(self.path("ca.pem"))
        context.verify_mode = ssl.CERT_REQUIRED
        return context

    @staticmethod
    def _new(name: str, suffix: str = ".pem") -> tuple[str, ...]:
        key = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-keyout", f"{name}.key")
        return *key, "-out", f"{name}{suffix}"

    def _openssl(self, *arguments: str) -> None:
        subprocess.run(["openssl", *arguments], cwd=self._directory, check=True, capture_output=True, timeout=60)


class TlsProxy:
    """Takes TLS connections on ``port`` and speaks plainly with ``backend`` on the same host; runs on a thread."""

    def __init__(self, context: ssl.SSLContext, backend: int) -> None:
        self.port = free_port()
        self._context = context
        self._backend = backend
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        starting = asyncio.start_server(self._serve, "127.0.0.1", self.port, ssl=context)
        self._server = asyncio.run_coroutine_threadsafe(starting, self._loop).result(10)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        behind_reader, behind_writer = await asyncio.open_connection("127.0.0.1", self._backend)
        await asyncio.gather(_pump(reader, behind_writer), _pump(behind_reader, writer))

    def close(self) -> None:
        self._loop.call_soon_threadsafe(self._server.close)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()


async def _pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    try:
        while data := await reader.read(1 << 18):
            writer.write(data)
            await writer.drain()
    except OSError:
        pass
    finally:
        writer.close()


@dataclass
class Secured:
    authority: Authority
    stranger: Authority
    """Another authority, which nobody trusts."""
    nats_port: int
    redis_port: int

    def environ(self, nats: str, redis: str) -> dict[str, str]:
        """What a program with these roles has in its environment."""
        trust = {
            f"PDQ_{server}_TLS_{what}": self.authority.path(name)
            for server in ("NATS", "REDIS")
            for what, name in (("CA", "ca.pem"), ("CERT", "client.pem"), ("KEY", "client.key"))
        }
        return trust | {
            "PDQ_NATS_URL": f"tls://127.0.0.1:{self.nats_port}",
            "PDQ_NATS_USER": nats,
            "PDQ_NATS_PASSWORD": password("nats", nats),
            "PDQ_REDIS_URL": f"rediss://127.0.0.1:{self.redis_port}/0",
            "PDQ_REDIS_USERNAME": redis,
            "PDQ_REDIS_PASSWORD": password("redis", redis),
        }


@contextmanager
def secured(directory: Path) -> Iterator[Secured]:
    """NATS and Valkey that take TLS with a client certificate and a password only."""
    authority, stranger = Authority(directory / "ca"), Authority(directory / "stranger")
    nats, valkey = _nats(directory / "nats", authority), _valkey(directory / "valkey")
    asyncio.run(nats.start())
    asyncio.run(valkey.start())
    proxy = TlsProxy(authority.server_context(), valkey.port)
    try:
        yield Secured(authority, stranger, nats.port, proxy.port)
    finally:
        proxy.close()
        asyncio.run(valkey.stop())
        asyncio.run(nats.stop())


def _nats(directory: Path, authority: Authority) -> Server:
    directory.mkdir()
    port = free_port()
    rules = block("nats")
    for role in NATS_ROLES:
        rules = rules.replace(f"$NATS_{role.upper()}_PASSWORD", f'"{password("nats", role)}"')
    files = {"cert_file": "server.pem", "key_file": "server.key", "ca_file": "ca.pem"}
    tls = "\n".join(f'{key}: "{authority.path(name)}"' for key, name in files.items())
    config = directory / "nats.conf"
    config.write_text(
        f'listen: "127.0.0.1:{port}"\nmax_payload: 8MB\njetstream {{ store_dir: "{directory}" }}\n'
        f"tls {{\n{tls}\nverify: true\n}}\n{rules}"
    )
    child = Child("nats", [_nats_binary(), "--config", str(config)], directory / "log")
    return Server("nats-server", directory, f"tls://127.0.0.1:{port}", child, port)


def _valkey(directory: Path) -> Server:
    directory.mkdir()
    port = free_port()
    rules = block("redis-acl")
    for role in REDIS_ROLES:
        rules = rules.replace(f">{role.upper()}-PASSWORD", f">{password('redis', role)}")
    acl = directory / "users.acl"
    acl.write_text(rules)
    options = ("--bind", "127.0.0.1", "--port", str(port), "--dir", str(directory), "--aclfile", str(acl))
    child = Child("valkey", [_valkey_binary(), *options, "--save", ""], directory / "log")
    return Server("valkey-server", directory, "", child, port)
