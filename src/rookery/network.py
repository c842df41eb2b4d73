"""How every process reaches a service: its address, the proxy before it, its certificate. One rule for clients,
environment hosts, workers and their transfers.

* The variables ``http_proxy``, ``https_proxy``, ``all_proxy`` and ``no_proxy``, also in capitals, choose the proxy.
  Addresses of this machine are reached without one. ``no_proxy`` has names (each with its sub-domains), addresses and
  networks such as ``10.0.0.0/8`` or ``::1/128``, separated by commas or spaces, each with an optional port; ``*`` is
  everything.
* A proxy speaks HTTP. A mistake in an address or a variable is one line, before anything is sent.
"""

from __future__ import annotations

import contextlib
import ipaddress
import logging
import os
import re
import socket
import ssl
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Any, Literal, Self
from urllib.parse import SplitResult, quote, unquote, urlsplit

from rookery.errors import UserError, short

log = logging.getLogger("rookery.network")

DEFAULT_PORTS = {"http": 80, "ws": 80, "https": 443, "wss": 443}
"""By scheme of a service's address."""

PROXY_VARIABLES = {
    "http": ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"),
    "https": ("https_proxy", "HTTPS_PROXY", "all_proxy", "ALL_PROXY"),
}
"""Where the proxy of a service with http (or ws) and https (or wss) is looked up, the first that is set."""

NO_PROXY_VARIABLES = ("no_proxy", "NO_PROXY")

_NO_CERTIFICATES = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)

_NAT64 = ipaddress.IPv6Network("64:ff9b::/96")

_GLOBAL_UNICAST = ipaddress.IPv6Network("2000::/3")
"""All of IPv6 that is assigned to the public internet."""

_SPECIAL = [ipaddress.ip_network(network) for network in ("192.0.0.0/24", "192.88.99.0/24", "3fff::/20")]
"""Networks of IANA's special-purpose registries that some versions of Python call global."""

_BRACKETED = re.compile(r"\[([^\[\]]+)\](/[0-9]+)?(?::([0-9]+))?")
"""An entry of ``no_proxy`` that is an address or a network of IPv6 in brackets, with or without a port."""


def service_url(address: str, name: str, scheme: Literal["http", "ws"] = "http", path: str = "") -> str:
    """The URL of ``path`` at a service's ``address``, which ``name`` gave, for HTTP or a WebSocket. An address has the
    scheme http, https, ws or wss (TLS or not is all that it says), a name or an IP address (IPv6 in brackets), and,
    where needed, a port and the path of a proxy. Raises :class:`UserError`, without a password, for anything else."""
    with contextlib.suppress(ValueError):
        parts = urlsplit(address)
        plain = not {*address} & {*" \t\n\r\\?#@"} and address.isprintable()
        if plain and parts.scheme in DEFAULT_PORTS and parts.hostname and parts.port != 0:
            parts.hostname.encode("idna")  # as a look-up does: a ValueError for an empty part, or one of 64 letters
            tls = "s" if parts.scheme in ("https", "wss") else ""
            return f"{scheme}{tls}://{parts.netloc}{parts.path.rstrip('/')}{path}"
    shown = short(repr(_without_password(address)))
    hint = f", such as http://{address}" if "://" not in address and _is_host(address) else ""
    if "@" in address.partition("://")[2 if "://" in address else 0].partition("/")[0]:
        hint = ", without a user and a password"
    raise UserError(f"{name}: given {shown}, allowed: an address with http:// or https://{hint}")


def named_services(text: str, setting: str, form: str, held: str) -> dict[str, list[str]]:
    """The comma-separated entries of a setting as [URL, word …] by name. ``form`` is an entry's, such as ``NAME=URL
    MODEL [VARIABLE]``, whose last word may be left out: the environment variable with ``held``. Raises
    :class:`UserError`."""
    found = {}
    most = len(form.split())
    for entry in filter(None, map(str.strip, text.split(","))):
        name, _, rest = entry.partition("=")
        words = rest.split()
        if not name.strip() or len(words) not in (most - 1, most):
            raise UserError(
                f"{setting}: given {short(entry)!r}, allowed: {form}, comma-separated, where VARIABLE is the"
                f" environment variable with {held}"
            )
        found[name.strip()] = [service_url(words[0], setting), *words[1:]]
    return found


def join_address(scheme: str, host: str, port: int) -> str:
    """The URL of a host, which may be an address of IPv6."""
    return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"


def dialled_host(host: str) -> str:
    """An address of this machine at which a listener on ``host`` is reached: all of a machine's are none to dial, with
    a proxy or a certificate."""
    return {"": "127.0.0.1", "0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)


def _is_host(text: str) -> bool:
    """Whether ``http://text`` is an address."""
    with contextlib.suppress(UserError):
        return text.isascii() and bool(service_url(f"http://{text}", ""))
    return False


def is_loopback(address: str) -> bool:
    """Whether the URL names this machine: no proxy is used for it."""
    host = urlsplit(address).hostname or ""
    with contextlib.suppress(ValueError):
        return ipaddress.ip_address(host).is_loopback
    return host == "localhost" or host.endswith(".localhost")


def proxy_of(address: str, environment: Mapping[str, str] = os.environ) -> str | None:
    """The HTTP proxy through which the service at ``address`` is reached; None for none. Raises :class:`UserError` for
    a proxy that cannot be used."""
    parts = urlsplit(address)
    if is_loopback(address) or _is_excepted(parts, _first(environment, NO_PROXY_VARIABLES)[1]):
        return None
    variable, value = _first(environment, PROXY_VARIABLES["https" if parts.scheme in ("https", "wss") else "http"])
    if not value:
        return None
    proxy = value if "://" in value else f"http://{value}"
    with contextlib.suppress(ValueError):
        found = urlsplit(proxy)
        if found.scheme in ("http", "https") and found.hostname and found.port != 0 and found.path in ("", "/"):
            return _with_credentials(found) or proxy
    without = f"or add {parts.hostname} to no_proxy"
    raise UserError(
        f"{variable}: given {short(_without_password(value))!r}, allowed: an HTTP proxy such as http://proxy:3128; set"
        f" one, {without}"
    )


def _with_credentials(proxy: SplitResult) -> str:
    """The address of a proxy with a user and a password, as all of the libraries read it: with both, also where a token
    is the user, and without characters that end a part of an address, such as the ``@`` in somebody's password. Empty
    without a user. Raises ValueError for a user that no proxy takes."""
    if proxy.username is None:
        return ""
    user, password = unquote(proxy.username), unquote(proxy.password or "")
    if ":" in user:
        raise ValueError("a colon ends the user")
    return f"{proxy.scheme}://{quote(user, safe='')}:{quote(password, safe='')}@{proxy.netloc.rpartition('@')[2]}"


def unusable_proxy(environment: Mapping[str, str] = os.environ) -> str:
    """The first variable with a proxy that the hub's library cannot use, as a line; empty where there is none. That
    library makes a client for the proxies of all variables before it asks for anything. It speaks SOCKS only with a
    package of its own, so this is a reason for a client that could not be made, not a check."""
    for variable in dict.fromkeys(PROXY_VARIABLES["https"] + PROXY_VARIABLES["http"]):
        value = environment.get(variable, "").strip()
        if "://" in value and value.partition("://")[0].lower() not in ("http", "https"):
            return (
                f"{variable}: given {short(_without_password(value))!r}, allowed: an HTTP proxy such as"
                " http://proxy:3128, or with the package socksio one with socks5://"
            )
    return ""


def reachable(address: str, name: str, allowed: str, confidential: bool = False) -> tuple[str, int]:
    """The IP address and the port at which a stranger's URL, which ``name`` gave, may be reached. Connect to that
    address and to no other: the name may mean another one when it is looked up again. Addresses that are not of the
    public internet are refused unless ``allowed`` names the host or the address, written as ``no_proxy`` is; so are all
    addresses without TLS for a ``confidential`` request. Blocks; raises :class:`UserError`."""
    parts = urlsplit(service_url(address, name))
    host, port = (parts.hostname or "").rstrip("."), parts.port or DEFAULT_PORTS[parts.scheme]
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        raise UserError(f"{name}: {short(host)} has no address ({error}); give a host that the service knows") from None
    entries = [entry.strip().lower() for entry in allowed.split(",")]
    for *_, (ip, *_) in found:
        named = any(_names(entry, host.lower(), port) or _names(entry, str(ip), port) for entry in entries)
        if not named and not is_public(str(ip)):
            raise UserError(
                f"{name}: {short(host)} is {ip}, which is not an address of the public internet; the administrator"
                f" allows it with ROOKERY_REACHABLE_HOSTS={short(host)}"
            )
        if confidential and not named and parts.scheme not in ("https", "wss"):
            raise UserError(
                f"{name}: a secret would be sent to {short(host)} in clear; give an address with https://, or the"
                f" administrator allows it with ROOKERY_REACHABLE_HOSTS={short(host)}"
            )
    return str(found[0][4][0]), port


def is_public(ip: str) -> bool:
    """Whether an address is one of the public internet, and so is the IPv4 address within one of IPv6."""
    address = _ip(ip)
    if address is None or not address.is_global or address.is_multicast:
        return False
    if any(address in network for network in _SPECIAL):
        return False
    if isinstance(address, ipaddress.IPv4Address):
        return True
    if address not in _GLOBAL_UNICAST and address not in _NAT64:
        return False
    teredo = address.teredo
    inner = [address.sixtofour, *(teredo or ())]
    if address in _NAT64:
        inner.append(ipaddress.IPv4Address(int(address) & 0xFFFFFFFF))
    return all(is_public(str(one)) for one in inner if one is not None)


def _without_password(proxy: str) -> str:
    """A proxy's address without the user and password in it."""
    scheme, mark, rest = proxy.rpartition("://")
    return f"{scheme}{mark}{rest.rpartition('@')[2]}"


def _first(environment: Mapping[str, str], variables: tuple[str, ...]) -> tuple[str, str]:
    """The first variable that is set to something, and its value; the last one and nothing if none is."""
    for variable in variables:
        if value := environment.get(variable, "").strip():
            return variable, value
    return variables[-1], ""


def _is_excepted(parts: SplitResult, no_proxy: str) -> bool:
    """Whether ``no_proxy`` names the host of an address."""
    host = (parts.hostname or "").rstrip(".").lower()
    port = parts.port or DEFAULT_PORTS.get(parts.scheme)
    return any(_names(entry, host, port) for entry in re.split(r"[,\s]+", no_proxy.lower()))


def _names(entry: str, host: str, port: int | None) -> bool:
    """Whether one entry of ``no_proxy`` names ``host``. An entry that cannot be read names nothing."""
    if entry == "*":
        return True
    address = _ip(host)
    if (bracketed := _BRACKETED.fullmatch(entry)) is not None:
        inner, size, wanted = bracketed.groups()
        return wanted in (None, str(port)) and _names(f"{inner}{size or ''}", host, port)
    with contextlib.suppress(ValueError):  # an address or a network, also of IPv6 without brackets
        network = ipaddress.ip_network(entry, strict=False)
        return address is not None and address.version == network.version and address in network
    name, colon, wanted = entry.rpartition(":")
    if colon:
        if wanted.isdecimal():
            return int(wanted) == port and _names(name, host, port)
        return False
    name = entry.removeprefix("*").strip(".")
    return bool(name) and address is None and (host == name or host.endswith(f".{name}"))


def _ip(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    """The address that ``host`` is, None for a name. IPv4 in IPv6 is that of IPv4."""
    try:
        address = ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return None
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return mapped or address


@lru_cache(4096)
def source_of(address: str) -> str:
    """Where a connection from ``address`` comes from, for limits by address: of IPv6 the network of 64 bits, all of
    whose addresses one machine may have; an IPv4 address in one of IPv6 is that address."""
    found = _ip(address)
    if isinstance(found, ipaddress.IPv6Address) and not found.is_loopback:
        return str(ipaddress.IPv6Network((int(found) >> 64 << 64, 64)))
    return address if found is None else str(found)


class FollowingContext(ssl.SSLContext):
    """Reads its files again before a handshake, where they have changed: certificates are renewed while processes run.
    Files that cannot be used, such as a new certificate whose key has not been written yet, change nothing."""

    def __new__(cls, usual: ssl.SSLContext, *arguments: object) -> Self:
        return super().__new__(cls, usual.protocol)

    def __init__(self, usual: ssl.SSLContext, files: Sequence[str], load: Callable[[ssl.SSLContext], object]) -> None:
        """``usual`` has the options; ``load`` reads the ``files`` into a context. Raises OSError."""
        self.options, self.minimum_version = usual.options, usual.minimum_version
        self.verify_flags = usual.verify_flags
        self._load, self._files = load, files
        self._read = self._refused = self._found()
        load(self)

    def _found(self) -> list[tuple[int, ...] | None]:
        """Changes with the files."""
        return [_stamp(file) for file in self._files]

    def _follow(self) -> None:
        found = self._found()
        if found == self._read:
            return
        try:
            self._load(ssl.SSLContext(self.protocol))  # what cannot be used would damage the context in use
            self._load(self)
        except OSError as error:
            if found != self._refused:
                log.warning("%s: the earlier one stays in use (%s)", self._files[0], error.strerror or error)
            self._refused = found
            return
        self._read = self._refused = found

    def wrap_socket(self, *arguments: Any, **named: Any) -> ssl.SSLSocket:
        self._follow()
        return super().wrap_socket(*arguments, **named)

    def wrap_bio(self, *arguments: Any, **named: Any) -> ssl.SSLObject:
        self._follow()
        return super().wrap_bio(*arguments, **named)


def _stamp(file: str) -> tuple[int, ...] | None:
    try:
        found = os.stat(file)
    except OSError:
        return None
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns


def client_tls(address: str, ca_file: str, environment: Mapping[str, str] = os.environ) -> ssl.SSLContext | None:
    """How a client checks the certificate of the service at ``address``. The certificates in ``ca_file`` are trusted
    in place of the system's, also a service's own, and followed where the file changes; on this machine it may be made
    out to any name. Else those of ``SSL_CERT_FILE`` and ``SSL_CERT_DIR`` are, where they are set. None is the client
    library's default, and no TLS at all for an address without it. Raises :class:`UserError`."""
    if urlsplit(address).scheme not in ("https", "wss"):
        return None
    file, folder = environment.get("SSL_CERT_FILE") or None, environment.get("SSL_CERT_DIR") or None
    if not ca_file and not file and not folder:
        return None
    try:
        if not ca_file:
            return ssl.create_default_context(cafile=file, capath=folder)
        usual = ssl.create_default_context(cafile=ca_file)
        context = FollowingContext(usual, (ca_file,), lambda context: context.load_verify_locations(ca_file))
    except OSError as error:
        name = f"setting ROOKERY_CA_FILE: {ca_file}" if ca_file else f"SSL_CERT_FILE, SSL_CERT_DIR: {file or folder}"
        raise UserError(f"{name} cannot be used ({error.strerror or error})") from None
    context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
    context.check_hostname = not is_loopback(address)
    return context


def http_tls(address: str, ca_file: str = "") -> ssl.SSLContext | Literal[True]:
    """:func:`client_tls` for a client of httpx, whose default reads the system's certificates also for an address
    without TLS: that gets a context without any, which trusts nobody."""
    if urlsplit(address).scheme == "http":
        return _NO_CERTIFICATES
    return client_tls(address, ca_file) or True
