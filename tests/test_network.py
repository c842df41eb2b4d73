"""One rule for addresses, proxies and certificates."""

from __future__ import annotations

import ipaddress
import os
import ssl
from pathlib import Path
from unittest.mock import AsyncMock, patch

import certifi
import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from websockets.proxy import parse_proxy

from rookery.client import Client
from rookery.client.connection import HttpConnection
from rookery.errors import Unavailable, UserError
from rookery.network import client_tls, http_tls, is_loopback, is_public, proxy_of, reachable, service_url, source_of
from rookery.settings import Settings
from rookery.worker.engine.vllm.attached import Attached
from rookery.worker.transfer.http import service_client
from rookery.worker.transfer.peers import PeerClient
from rookery.worker.transfer.published import Reads

PROXY = "http://proxy:3128"


@pytest.mark.parametrize(
    ("no_proxy", "through"),
    [
        ("a.b example.org  c.d", False),
        ("a.b\texample.com", True),
        ("", True),
        ("*", False),
        ("127.0.0.1,localhost,::1/128,10.0.0.0/8", True),
        ("::1/128, host.example.org", False),
        ("example.org", False),
        (".example.org", False),
        ("*.example.org", False),
        ("EXAMPLE.org", False),
        ("ample.org", True),
        ("other.example.org", True),
        ("host.example.org:7077", False),
        ("host.example.org:80", True),
        ("host.example.org:http", True),
        ("nonsense/99, [, :::, 300.1.1.1/8, host.example.org.evil", True),
    ],
)
def test_no_proxy_names_hosts(no_proxy: str, through: bool) -> None:
    for variable in ("no_proxy", "NO_PROXY"):
        for scheme in ("http", "ws"):
            found = proxy_of(f"{scheme}://host.example.org:7077", {"http_proxy": PROXY, variable: no_proxy})
            assert found == (PROXY if through else None)


@pytest.mark.parametrize(
    ("address", "no_proxy", "through"),
    [
        ("http://10.1.2.3:7077", "10.0.0.0/8", False),
        ("http://10.1.2.3:7077", "10.1.2.3", False),
        ("http://10.1.2.3:7077", "10.1.2.3:7077", False),
        ("http://10.1.2.3:7077", "10.1.2.3:70", True),
        ("http://11.1.2.3:7077", "10.0.0.0/8", True),
        ("http://[fd00::1]:7077", "fd00::/8", False),
        ("http://[fd00::1]:7077", "[fd00::1]", False),
        ("http://[fd00::1]:7077", "[fd00::1]:7077", False),
        ("http://[fd00::1]:7077", "::1/128", True),
        ("http://[::ffff:10.1.2.3]:7077", "10.0.0.0/8", False),
        ("http://127.0.0.1:7077", "", False),
        ("http://[::1]:7077", "", False),
        ("http://localhost:7077", "", False),
        ("http://a.localhost:7077", "", False),
        ("http://1.example", "1", True),
    ],
)
def test_no_proxy_names_addresses_and_networks(address: str, no_proxy: str, through: bool) -> None:
    assert proxy_of(address, {"HTTP_PROXY": PROXY, "NO_PROXY": no_proxy}) == (PROXY if through else None)


@given(
    address=st.ip_addresses(),
    network=st.ip_addresses().flatmap(
        lambda ip: st.integers(0, ip.max_prefixlen).map(lambda bits: ipaddress.ip_network(f"{ip}/{bits}", strict=False))
    ),
)
def test_a_network_names_exactly_its_addresses(
    address: ipaddress.IPv4Address | ipaddress.IPv6Address, network: ipaddress.IPv4Network | ipaddress.IPv6Network
) -> None:
    host = f"[{address}]" if address.version == 6 else str(address)
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    inside = any(one is not None and one.version == network.version and one in network for one in (mapped or address,))
    found = proxy_of(f"http://{host}:1", {"http_proxy": PROXY, "no_proxy": f"x.y,{network}"})
    assert (found is None) == (inside or address.is_loopback)


@given(no_proxy=st.text(max_size=40), host=st.from_regex(r"[a-z]{1,8}(\.[a-z]{1,8}){0,2}", fullmatch=True))
def test_any_text_in_no_proxy_is_read_without_an_exception(no_proxy: str, host: str) -> None:
    assert proxy_of(f"http://{host}:1", {"http_proxy": PROXY, "no_proxy": no_proxy}) in (PROXY, None)


def test_the_scheme_chooses_the_variable() -> None:
    variables = {"http_proxy": "http://a:1", "https_proxy": "b:2", "all_proxy": "http://c:3"}
    assert proxy_of("http://h", variables) == proxy_of("ws://h", variables) == "http://a:1"
    assert proxy_of("https://h", variables) == proxy_of("wss://h", variables) == "http://b:2"
    for variable in ("all_proxy", "ALL_PROXY"):
        assert proxy_of("https://h", {variable: "http://c:3", "https_proxy": " "}) == "http://c:3"
    assert proxy_of("https://h", {"http_proxy": "http://a:1"}) is None
    assert proxy_of("http://h", {}) is None


@pytest.mark.parametrize(
    ("credentials", "user", "password"),
    [
        ("user:secret", "user", "secret"), ("token", "token", ""), ("user:", "user", ""), ("user:p@ss", "user", "p@ss"),
        ("user:p%40ss%3a", "user", "p@ss:"), ("user:a:b", "user", "a:b"), ("user:p ä%zz", "user", "p ä%zz"),
        ("DOM%5Cuser:x", "DOM\\user", "x"),
    ],
)  # fmt: skip
def test_the_credentials_of_a_proxy_reach_it_through_every_library(credentials: str, user: str, password: str) -> None:
    """Clients and transfers use one library, workers and hosts another."""
    for proxy in (f"http://{credentials}@proxy:3128", f"{credentials}@proxy:3128"):
        found = proxy_of("http://h", {"http_proxy": proxy})
        assert found is not None
        assert httpx.Proxy(found).raw_auth == (user.encode(), password.encode())
        assert httpx.Proxy(found).url == "http://proxy:3128"
        dialled = parse_proxy(found)
        assert (dialled.user_info, dialled.host, dialled.port) == ((user, password), "proxy", 3128)


@pytest.mark.parametrize("wrong", ["socks5://proxy:1080", "socks5h://user:secret@p", "ftp://p", "http://", "http://p:x",
                                   "http://p/path", "://", "http://p:99999", "http://a%3Ab:secret@p"])  # fmt: skip
def test_a_proxy_that_cannot_be_used_is_one_line(wrong: str) -> None:
    for variable in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        with pytest.raises(UserError, match=rf"{variable}: given .*or add h to no_proxy") as caught:
            proxy_of("http://h:7077", {variable: wrong})
        assert "secret" not in str(caught.value) and "\n" not in str(caught.value)
        assert proxy_of("http://h:7077", {variable: wrong, "no_proxy": "h"}) is None
        assert proxy_of("http://127.0.0.1:7077", {variable: wrong}) is None


@pytest.mark.parametrize(
    ("address", "http", "ws"),
    [
        ("http://h", "http://h", "ws://h"),
        ("HTTP://h:7077/", "http://h:7077", "ws://h:7077"),
        ("ws://h:1", "http://h:1", "ws://h:1"),
        ("https://a.b/x/", "https://a.b/x", "wss://a.b/x"),
        ("wss://a.b///", "https://a.b", "wss://a.b"),
        ("https://a.b/x//y", "https://a.b/x//y", "wss://a.b/x//y"),
        ("http://[::1]:7077", "http://[::1]:7077", "ws://[::1]:7077"),
        ("http://[fe80::1%25eth0]/p", "http://[fe80::1%25eth0]/p", "ws://[fe80::1%25eth0]/p"),
        ("http://10.0.0.1:65535", "http://10.0.0.1:65535", "ws://10.0.0.1:65535"),
        ("http://h:", "http://h:", "ws://h:"),
    ],
)
def test_an_address_is_read_in_one_way(address: str, http: str, ws: str) -> None:
    """By clients, workers, environment hosts and the settings."""
    assert service_url(address, "x") == http
    assert service_url(address, "x", "ws", "/wire/host") == f"{ws}/wire/host"
    assert Settings.load({"ROOKERY_URL": address}).base_url == address
    Client(address, "tml-x").close()


@pytest.mark.parametrize(
    ("wrong", "hint"),
    [
        ("localhost:7077", "such as http://localhost:7077"),
        ("10.0.0.1", "such as http://10.0.0.1"),
        ("[::1]:7077", "such as http://[::1]:7077"),
        ("ftp://h", ""), ("http://", ""), ("http:///x", ""), ("//h", ""), ("http://h:x", ""), ("http://h:0", ""),
        ("http://h:99999", ""), ("http://a b", ""), ("http://[::1", ""), ("nonsense here", ""), ("http://h\n", ""),
        ("http://::1:7077", ""), ("", ""), ("http://h?x=1", ""), ("http://h/#top", ""),
        ("http://user:secret@h:1", "without a user and a password"),
        ("http://h\\x", ""), ("http://h:-1", ""), ("http://:7077", ""), ("http://h:\N{ARABIC-INDIC DIGIT FOUR}", ""),
        ("http://rookery..svc:7077", ""), ("http://" + "h" * 64, ""), ("http://h..\N{GREEK SMALL LETTER ALPHA}", ""),
    ],
)  # fmt: skip
def test_an_address_without_a_scheme_or_host_is_one_line(wrong: str, hint: str) -> None:
    with pytest.raises(UserError, match=r"x: given .*, allowed: an address with http:// or https://") as caught:
        service_url(wrong, "x")
    assert str(caught.value).endswith(hint) and "\n" not in str(caught.value) and "secret" not in str(caught.value)
    with pytest.raises(UserError):
        Client(wrong, "tml-x")


def test_a_host_becomes_an_address() -> None:
    assert Settings.load({}, host="::1", port=7).base_url == "http://[::1]:7"
    assert Settings.load({}, host="10.0.0.1", port=7).base_url == "http://10.0.0.1:7"


@given(text=st.text(max_size=30) | st.from_regex(r"(http|ws)s?://[\[\]a-z0-9:.@/?#%-]{0,20}", fullmatch=True))
def test_any_text_is_an_address_or_refused(text: str) -> None:
    try:
        found = service_url(text, "x")
    except UserError as error:
        assert len(str(error).splitlines()) == 1
    else:
        assert service_url(found, "x") == found, "it is read again as it was written"
        assert httpx.URL(found).host


def test_certificates_of_the_settings_win_over_those_of_the_system(tmp_path: Path) -> None:
    assert client_tls("http://h", "nowhere", {}) is None and client_tls("https://h", "", {}) is None
    for ca_file, variables, name in (
        (str(tmp_path / "no.pem"), {}, "ROOKERY_CA_FILE"),
        ("", {"SSL_CERT_FILE": str(tmp_path / "no.pem")}, "SSL_CERT_FILE"),
    ):
        with pytest.raises(UserError, match=f"{name}.* cannot be used"):
            client_tls("wss://h", ca_file, variables)


def test_certificates_that_are_missing_do_not_matter_without_tls() -> None:
    """A shell may set SSL_CERT_FILE for other programs."""
    missing = {"SSL_CERT_FILE": "/nonexistent.pem", "SSL_CERT_DIR": "/nonexistent"}
    with patch.dict(os.environ, missing), Client("http://127.0.0.1:1", "tml-x") as client, pytest.raises(Unavailable):
        client.models()


async def test_clients_of_addresses_without_tls_read_no_certificates() -> None:
    """A bundle takes longer to read than a request."""
    with patch.object(certifi, "where", side_effect=AssertionError):
        HttpConnection("http://h", None)
        await service_client("http://h,http://i", 1.0).aclose()
        await PeerClient(1.0, Reads(), AsyncMock()).close()
        with pytest.raises(Unavailable, match="vLLM"):
            await Attached(Settings().replace(vllm_url="http://127.0.0.1:1")).start()
    nobody = http_tls("http://h")
    assert isinstance(nobody, ssl.SSLContext) and nobody.verify_mode == ssl.CERT_REQUIRED and not nobody.get_ca_certs()


def test_this_machine_has_several_names() -> None:
    for here in ("http://localhost", "http://127.1.2.3:1", "ws://[::1]:9"):
        assert is_loopback(here)
    for there in ("http://10.0.0.1", "http://localhost.example", "http://0.0.0.0", "nonsense"):
        assert not is_loopback(there)


@pytest.mark.parametrize(
    ("host", "url"),
    [
        ("0.0.0.0", "http://127.0.0.1:7077"), ("::", "http://[::1]:7077"), ("127.0.0.2", "http://127.0.0.2:7077"),
        ("::1", "http://[::1]:7077"), ("10.0.0.1", "http://10.0.0.1:7077"), ("localhost", "http://localhost:7077"),
    ],
)  # fmt: skip
def test_a_service_on_all_addresses_is_dialled_at_this_machines(host: str, url: str) -> None:
    """Any other would be sought behind a proxy, and be in no certificate."""
    settings = Settings.load({"ROOKERY_HOST": host})
    assert settings.base_url == url
    assert proxy_of(settings.base_url, {"http_proxy": PROXY}) == (None if is_loopback(url) else PROXY)


@pytest.mark.parametrize(
    ("ip", "public"),
    [
        ("8.8.8.8", True), ("2606:4700::1111", True), ("127.0.0.1", False), ("10.1.2.3", False),
        ("172.16.0.1", False), ("192.168.1.1", False), ("169.254.169.254", False), ("100.64.0.1", False),
        ("0.0.0.0", False), ("224.0.0.1", False), ("255.255.255.255", False), ("198.18.0.1", False), ("::1", False),
        ("::", False), ("fe80::1", False), ("fe80::1%eth0", False), ("fc00::1", False), ("ff02::1", False),
        ("::ffff:127.0.0.1", False), ("::ffff:8.8.8.8", True), ("64:ff9b::127.0.0.1", False),
        ("64:ff9b::8.8.8.8", True), ("2002:7f00:1::", False), ("2002:a9fe:a9fe::1", False), ("not an address", False),
        ("192.0.0.8", False), ("192.88.99.1", False), ("192.31.196.1", True), ("fec0::1", False),
        ("::127.0.0.1", False),
        ("::8.8.8.8", False), ("3fff::1", False), ("5f00::1", False), ("64:ff9b:1::7f00:1", False), ("4000::1", False),
        ("2001:0:7f00:1::", False), ("2001:4860:4860::8888", True),
    ],
)  # fmt: skip
def test_addresses_of_the_public_internet(ip: str, public: bool) -> None:
    assert is_public(ip) is public


@pytest.mark.parametrize(
    ("address", "allowed", "ip"),
    [
        ("http://8.8.8.8", "", "8.8.8.8"),
        ("https://[2606:4700::1111]:8443/x", "", "2606:4700::1111"),
        ("http://127.0.0.1:9", "127.0.0.1", "127.0.0.1"),
        ("http://127.0.0.1:9", "127.0.0.0/8", "127.0.0.1"),
        ("http://127.0.0.1:9", "127.0.0.1:9", "127.0.0.1"),
        ("http://127.0.0.1:9", "*", "127.0.0.1"),
        ("http://localhost:9", "localhost", None),
        ("http://127.0.0.1:9", "127.0.0.1:10", ""),
        ("http://127.0.0.1:9", "", ""),
        ("http://127.1:9", "", ""),
        ("http://2130706433:9", "", ""),
        ("http://0x7f000001:9", "", ""),
        ("http://localhost:9", "", ""),
        ("http://LOCALHOST.:9", "", ""),
        ("http://[::ffff:127.0.0.1]:9", "", ""),
        ("http://[::1]", "", ""),
        ("http://0:9", "", ""),
    ],
)
def test_private_addresses_are_reached_only_where_they_are_allowed(address: str, allowed: str, ip: str | None) -> None:
    if ip == "":
        with pytest.raises(UserError, match=r"not an address of the public internet.*ROOKERY_REACHABLE_HOSTS="):
            reachable(address, "environment.url", allowed)
    else:
        found, _ = reachable(address, "environment.url", allowed)
        assert found == ip if ip is not None else found in ("127.0.0.1", "::1")


@pytest.mark.parametrize(
    ("address", "allowed", "confidential", "refused"),
    [
        ("http://8.8.8.8", "", False, False),
        ("http://8.8.8.8", "", True, True),
        ("http://[2001:4860:4860::8888]:81", "8.8.8.8", True, True),
        ("ws://8.8.8.8", "", True, True),
        ("https://8.8.8.8", "", True, False),
        ("wss://8.8.8.8", "", True, False),
        ("http://8.8.8.8:81", "8.8.8.8:82", True, True),
        ("http://8.8.8.8:81", "8.8.8.8:81", True, False),
        ("http://8.8.8.8", "*", True, False),
        ("http://localhost:9", "localhost", True, False),
    ],
)
def test_a_secret_goes_in_clear_only_to_hosts_that_are_allowed(
    address: str, allowed: str, confidential: bool, refused: bool
) -> None:
    if refused:
        with pytest.raises(UserError, match=r"^x: a secret .* in clear; give an address with https://.*HOSTS="):
            reachable(address, "x", allowed, confidential)
    else:
        assert reachable(address, "x", allowed, confidential)


@pytest.mark.parametrize(
    "address", ["http://no-such-host.invalid", "ftp://8.8.8.8", "http://", "http://a b", "file:///x"]
)
def test_an_address_that_is_none_is_refused(address: str) -> None:
    with pytest.raises(UserError, match=r"environment\.url: "):
        reachable(address, "environment.url", "*")


@pytest.mark.parametrize(
    ("address", "source"),
    [
        ("192.0.2.7", "192.0.2.7"),
        ("::ffff:192.0.2.7", "192.0.2.7"),
        ("::ffff:127.0.0.1", "127.0.0.1"),
        ("::1", "::1"),
        ("2001:db8:0:1::7", "2001:db8:0:1::/64"),
        ("2001:db8:0:1:ffff:ffff:ffff:ffff", "2001:db8:0:1::/64"),
        ("2001:db8:0:2::7", "2001:db8:0:2::/64"),
        ("fe80::1%eth0", "fe80::/64"),
        ("testclient", "testclient"),
        ("", ""),
    ],
)
def test_addresses_that_one_machine_may_have_count_as_one(address: str, source: str) -> None:
    assert source_of(address) == source
