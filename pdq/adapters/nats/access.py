"""Who we are to a NATS server, and whether we trust it: URL, credentials, TLS, and what a refusal means."""

from typing import Any
from urllib.parse import urlsplit

import nats.errors

from pdq.adapters.nats import credentials
from pdq.adapters.tls import client_context
from pdq.core.errors import InvalidSettings
from pdq.core.settings import NatsSettings


def options_of(settings: NatsSettings) -> dict[str, Any]:
    """Credentials and certificates besides the URL, as nats-py takes them.

    Raises:
        InvalidSettings: they cannot be understood, or contradict each other.
    """
    options = _credentials(settings)
    if settings.tls_ca or settings.tls_cert or settings.tls_key:
        options["tls"] = client_context("NATS", settings.tls_ca, settings.tls_cert, settings.tls_key)
    return options


def demands_tls(settings: NatsSettings) -> bool:
    return bool(settings.tls_ca or settings.tls_cert or "tls://" in settings.url)


def places(settings: NatsSettings) -> str:
    """Hosts and ports, without users and passwords.

    Raises:
        InvalidSettings: not URLs of NATS servers.
    """
    return ",".join(_place(url.strip()) for url in settings.url.split(",") if url.strip())


def _place(url: str) -> str:
    try:
        parts = urlsplit(url if "//" in url else f"//{url}")
        host, port = parts.hostname, parts.port or 4222
    except ValueError:  # what it says may quote a part of the password
        host, port = None, 0
    if not host or parts.scheme not in ("", "nats", "tls"):
        raise InvalidSettings(
            "PDQ_NATS_URL is not a URL like nats://host:4222 or tls://user:password@host:4222; write special characters "
            "of a password as %XX, or set PDQ_NATS_PASSWORD instead"
        )
    return f"{host}:{port}"


def _credentials(settings: NatsSettings) -> dict[str, Any]:
    """The one way to authenticate that the settings name besides the URL, as nats-py takes it."""
    if bool(settings.user) != bool(settings.password):
        raise InvalidSettings("PDQ_NATS_USER and PDQ_NATS_PASSWORD go together: one of them is set, the other is not")
    ways: dict[str, dict[str, Any]] = {}
    if settings.user:
        ways["PDQ_NATS_USER"] = {"user": settings.user, "password": settings.password.reveal()}
    if settings.token:
        ways["PDQ_NATS_TOKEN"] = {"token": settings.token.reveal()}
    if settings.credentials:
        credentials.check(settings.credentials)
        ways["PDQ_NATS_CREDENTIALS"] = {"user_credentials": settings.credentials}
    if len(ways) > 1:
        raise InvalidSettings(f"{' and '.join(ways)} are both set: a connection has one way to authenticate")
    return next(iter(ways.values()), {})


def advice(why: str, settings: NatsSettings) -> str:
    """Which settings to look at after a refusal that no waiting helps."""
    if "authorization violation" in why.lower():
        if settings.credentials:
            return (
                f"; the user of PDQ_NATS_CREDENTIALS={settings.credentials!r} must be of an account that this server "
                "knows, and its JWT neither expired nor revoked"
            )
        return "; see PDQ_NATS_USER and PDQ_NATS_PASSWORD, PDQ_NATS_TOKEN or PDQ_NATS_CREDENTIALS"
    if "CERTIFICATE_VERIFY_FAILED" in why:
        return "; its certificate is not trusted, see PDQ_NATS_TLS_CA"
    if nats.errors.SecureConnWantedError.__name__ in why:
        return "; it does not offer TLS, which PDQ_NATS_URL or PDQ_NATS_TLS_CA demands"
    return ""
