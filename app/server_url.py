"""The address of a Redis or Valkey server, checked where it is read: later it is a traceback of a library."""

from __future__ import annotations

from urllib.parse import urlsplit

FORMS = "redis://host:6379/0, rediss://… or unix:///path"


def check_server_url(url: str) -> str:
    """``url``, if the ledger's client and Celery's can use it. Errors do not repeat it: it may hold a password.

    Raises:
        ValueError: it is none of ``FORMS``.
    """
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError as error:  # "Port could not be cast to integer value as 'x'", "Invalid IPv6 URL"
        raise ValueError(f"is no address like {FORMS}: {error}") from None
    if parts.scheme not in ("redis", "rediss", "unix") or not url.startswith(f"{parts.scheme}://"):
        raise ValueError(f"must be an address like {FORMS}")
    if parts.scheme == "unix":
        if not parts.path.strip("/"):
            raise ValueError("names no socket: unix:///path")
    elif not parts.hostname or port == 0:
        raise ValueError(f"names no host, or port 0: it must be an address like {FORMS}")
    elif parts.path.strip("/") and not parts.path.strip("/").isdecimal():
        raise ValueError("must end with the number of a database (/0) or with nothing")
    return url


def check_client_options(url: str) -> str:
    """``url``, if redis-py knows what stands behind its ``?``: those are arguments of its connection.

    Raises:
        ValueError: it does not.
    """
    if "?" not in url:
        return url
    from redis import ConnectionPool, RedisError  # here: `baton status` in a loop need not import it each time

    try:
        ConnectionPool.from_url(url).make_connection()  # does not connect
    except (ValueError, TypeError, RedisError) as error:
        raise ValueError(f"has an option that the client does not take: {error}") from None
    return url
