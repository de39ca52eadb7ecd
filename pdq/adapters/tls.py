"""TLS of clients, from the files that a group of settings names, read in one way and refused in the same words."""

import ssl

from pdq.core.errors import InvalidSettings


def client_context(group: str, ca: str, cert: str, key: str) -> ssl.SSLContext:
    """A context that verifies the server's certificate and name: against ``ca``, or the system's if that is empty.

    Raises:
        InvalidSettings: a file cannot be read, or is not what it must be; names the variable ``PDQ_<group>_TLS_...``.
    """
    try:
        context = ssl.create_default_context(cafile=ca or None)
    except OSError as error:
        raise InvalidSettings(f"PDQ_{group}_TLS_CA={ca!r} is no file with certificates: {_why(error)}") from error
    if key and not cert:
        raise InvalidSettings(
            f"PDQ_{group}_TLS_KEY is set and PDQ_{group}_TLS_CERT is not: a key needs its certificate"
        )
    if cert:
        try:
            # An empty password: a key that needs one must not make a program without a terminal ask for it.
            context.load_cert_chain(cert, key or None, password="")
        except OSError as error:
            what = f"PDQ_{group}_TLS_CERT={cert!r} and PDQ_{group}_TLS_KEY={key!r}"
            raise InvalidSettings(f"{what} are no certificate with its key: {_why(error)}") from error
    return context


def _why(error: OSError) -> str:
    return str(error.strerror or error)
