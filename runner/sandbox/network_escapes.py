"""Ways past the network of a workspace, as commands that try them beside a proxy that lets one host through.

They are written like the other escapes. Each ends with ``asked N``, the connections on which it said something to the
proxy, which all have to be told.
"""

from __future__ import annotations

import re
import socketserver
import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from ipaddress import ip_address

from msgspec import Struct

from runner.core.hosts import Address, NetworkRule, NetworkSpec
from runner.sandbox.escapes import Escape

OPEN, CLOSED, BAIT = "open.test", "closed.test", b"bait"
_NAMES = {OPEN: "127.0.0.1", CLOSED: "127.0.0.1", "meta.test": "169.254.169.254", "mapped.test": "::ffff:127.0.0.1"}
_LURES = ("meta.test", "mapped.test", "rebound.test")  # allowed names with addresses that are not
_ASKED = re.compile(rb"^asked ([0-9]+)$", re.M)

_PRELUDE = """
import os, socket, ssl, struct, sys, time
proxy, port = ("127.0.0.1", int(os.environ["PROBE_PROXY"])), int(os.environ["PROBE_PORT"])
many, hosts = int(os.environ["PROBE_MANY"]), os.environ["PROBE_ADDRESSES"].split()
asked = 0
def exchange(data, seconds=20):
    global asked
    asked += 1
    with socket.create_connection(proxy, seconds) as end:
        try:
            end.sendall(data)
            answer = b""
            while more := end.recv(65536): answer += more
            return answer
        except OSError:
            return b""
def refused(what, data):
    answer = exchange(data)
    if b"bait" in answer or b" 200 " in answer[:16] or answer[2:4] == bytes([5, 0]): print("!", what, answer[:60])
def still():
    wanted = b"GET http://open.test:%d/ HTTP/1.1\\r\\nHost: a\\r\\n\\r\\n" % port
    for _ in range(50):
        if b"fine" in exchange(wanted): return
        time.sleep(0.1)
    print("! keeps others from the proxy")
"""


def _python(name: str, about: str, script: str) -> Escape:
    return Escape(name, about, ("python3", "-SIc", f"{_PRELUDE}{script}\nprint('asked', asked)\nprint('done')"))


NETWORK_ESCAPES = (
    _python(
        "direct",
        "connections past the proxy: to this host, the bridge of docker, metadata, over IPv4 and IPv6",
        """
for host in ["127.0.0.1", "::1", "172.17.0.1", "169.254.169.254", "fd00:ec2::254", "8.8.8.8", *hosts]:
    for name in {host, "::ffff:" + host if "." in host else host}:
        for number in (port, 22, 53, 80, 443, 2375):
            with socket.socket(socket.AF_INET6 if ":" in name else socket.AF_INET) as end:
                end.settimeout(0.3)
                try: end.connect((name, number))
                except OSError: continue
                if (name.removeprefix("::ffff:"), number) != proxy: print("! connects to", name, number)
""",
    ),
    _python(
        "datagrams",
        "datagrams, ICMP and raw packets to elsewhere, and multicast",
        """
query = bytes.fromhex("123401000001000000000000076578616d706c6503636f6d0000010001")
for host in ["127.0.0.1", "127.0.0.11", "127.0.0.53", "8.8.8.8", "2001:4860:4860::8888", "224.0.0.251", *hosts]:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    for number in (53, 5353, port):
        with socket.socket(family, socket.SOCK_DGRAM) as end:
            end.settimeout(0.2)
            try:
                end.sendto(query, (host, number))
                if end.recv(512): print("! is answered by", host, number)
            except OSError: pass
    for kind in (socket.SOCK_DGRAM, socket.SOCK_RAW):
        try:
            with socket.socket(family, kind, 58 if ":" in host else 1) as end:
                end.settimeout(0.2)
                end.sendto(bytes.fromhex("0800f7fe00010000"), (host, 0))
                if not host.startswith("127.") and end.recv(512): print("! pings", host)
        except OSError: pass
try: socket.socket(socket.AF_PACKET, socket.SOCK_RAW, 3); print("! makes a socket of packets")
except OSError: pass
""",
    ),
    _python(
        "names",
        "names: by the resolver, and by DNS over TCP, TLS and HTTPS through the proxy",
        """
for name in ("example.com", "open.test", "metadata.google.internal"):
    try: socket.getaddrinfo(name, 80); print("! resolves", name)
    except OSError: pass
for place in ("8.8.8.8:53", "1.1.1.1:853", "dns.google:443", "cloudflare-dns.com:443", "127.0.0.53:53"):
    refused("asks for names at " + place, b"CONNECT %s HTTP/1.1\\r\\nHost: a\\r\\n\\r\\n" % place.encode())
""",
    ),
    _python(
        "hosts",
        "hosts that no rule names, and private addresses in every spelling",
        """
names = [
    "127.0.0.1", "localhost", "0.0.0.0", "[::1]", "[::]", "[::ffff:127.0.0.1]", "[::ffff:7f00:1]", "[64:ff9b::7f00:1]",
    "2130706433", "0x7f000001", "0x7f.1", "0177.0.0.1", "127.1", "127.0.0.1.", "169.254.169.254", "[fd00:ec2::254]",
    "172.17.0.1", "closed.test", "meta.test", "mapped.test", "rebound.test", "open.test.closed.test", "other.test",
    "open.test%00.closed.test", "open.test@closed.test", "closed.test#open.test", "open.test\\t", "open.test\\0",
    *hosts,
]
end, get = b" HTTP/1.1\\r\\nHost: open.test\\r\\n\\r\\n", b"GET / HTTP/1.0\\r\\n\\r\\n"
for name in names:
    plain = name.strip("[]").encode()
    by_name = b"\\5\\1\\0\\5\\1\\0\\3" + bytes([len(plain)]) + plain
    for number in (port, 80):
        place = f"{name}:{number}".encode()
        refused("connects to " + name, b"CONNECT " + place + end + get)
        refused("gets " + name, b"GET http://" + place + b"/" + end)
        refused("reaches by SOCKS " + name, by_name + number.to_bytes(2, "big") + get)
for number in (22, 443, 1, 65535):
    refused("reaches another port", b"CONNECT open.test:%d" % number + end)
for command in (2, 3):
    refused("listens, or sends datagrams, by SOCKS", bytes([5, 1, 0, 5, command, 0, 1, 0, 0, 0, 0, 0, 0]))
for _ in range(20):
    refused("reaches a name that changes", b"CONNECT rebound.test:%d" % port + end + get)
""",
    ),
    _python(
        "framing",
        "a request hidden in another, headers that are two, and other ways to be read in two ways",
        """
first = b"POST http://open.test:%d/ HTTP/1.1\\r\\nHost: open.test\\r\\n" % port
inner = b"GET http://closed.test:%d/ HTTP/1.1\\r\\nHost: closed.test\\r\\n\\r\\n" % port
for what, data in {
    "behind the first": b"GET http://open.test:%d/ HTTP/1.1\\r\\nHost: a\\r\\n\\r\\n" % port + inner,
    "two lengths": first + b"Content-Length: 5\\r\\nTransfer-Encoding: chunked\\r\\n\\r\\n0\\r\\n\\r\\n" + inner,
    "two equal names": first + b"Content-Length: 0\\r\\nContent-Length: %d\\r\\n\\r\\n" % len(inner) + inner,
    "an unknown coding": first + b"Transfer-Encoding: xchunked\\r\\n\\r\\n0\\r\\n\\r\\n" + inner,
    "two codings": first + b"Transfer-Encoding: chunked, identity\\r\\n\\r\\n0\\r\\n\\r\\n" + inner,
    "a bad chunk": first + b"Transfer-Encoding: chunked\\r\\n\\r\\n0;\\n" + inner,
    "a bare newline": first + b"X: a\\nHost: closed.test\\r\\nContent-Length: 0\\r\\n\\r\\n" + inner,
    "a folded header": first + b"X: a\\r\\n Host: closed.test\\r\\nContent-Length: 0\\r\\n\\r\\n" + inner,
    "a space before the colon": first + b"Content-Length : 0\\r\\n\\r\\n" + inner,
    "a line in the URL": b"GET http://open.test:%d/\\rX: HTTP/1.1\\r\\nHost: a\\r\\n\\r\\n" % port + inner,
    "another host": b"GET http://open.test:%d/ HTTP/1.1\\r\\nHost: closed.test:%d\\r\\n\\r\\n" % (port, port),
    "a path for a URL": b"GET / HTTP/1.1\\r\\nHost: closed.test:%d\\r\\n\\r\\n" % port,
    "HTTP/2": b"PRI * HTTP/2.0\\r\\n\\r\\nSM\\r\\n\\r\\n",
}.items():
    answer = exchange(data)
    if b"bait" in answer: print("! reaches another host by", what)
for name in ("closed.test", "other.test"):
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    asked += 1
    with socket.create_connection(proxy, 20) as end:
        end.sendall(b"CONNECT open.test:%d HTTP/1.1\\r\\nHost: a\\r\\n\\r\\n" % port)
        end.recv(4096)
        try: context.wrap_socket(end, server_hostname=name); print("! speaks TLS to", name)
        except OSError: pass
""",
    ),
    _python(
        "floods",
        "keeping the proxy busy: slow requests, and very many",
        """
slow = [socket.create_connection(proxy, 20) for _ in range(50)]
for end in slow: end.sendall(b"CONNECT open.te")
asked += len(slow)
still()
for end in slow: end.close()
left = many
while left:
    batch = []
    for _ in range(min(left, 100)):
        try:
            batch.append(socket.create_connection(proxy, 20))
            batch[-1].sendall(b"CONNECT closed.test:%d HTTP/1.1\\r\\nHost: a\\r\\n\\r\\n" % port)
        except OSError: pass
    for end in batch:
        asked += 1
        try: answer = end.recv(100)
        except OSError: answer = b""
        if b" 200 " in answer: print("! is let through among many")
        end.close()
    left -= min(left, 100)
still()
""",
    ),
)


class NetworkBait(Struct):
    """Servers that no command should reach, and the host that it may. ``reached`` is what came in past the proxy."""

    variables: dict[str, str]
    allowed: NetworkSpec
    reached: list[str]
    _asked: int = 0

    async def resolve(self, host: str) -> Sequence[Address]:
        """Resolve the names of the escapes; one of them is another address each time."""
        if host == "rebound.test":
            self._asked += 1
            return [ip_address("127.0.0.1" if self._asked % 2 else "169.254.169.254")]
        if host not in _NAMES:
            raise OSError("no such name")
        return [ip_address(_NAMES[host])]


def asked_of(stdout: bytes) -> int:
    """Return how many connections an escape made to the proxy."""
    found = _ASKED.search(stdout)
    return int(found[1]) if found is not None else 0


@contextmanager
def open_network_bait(addresses: Sequence[str], *, many: int) -> Iterator[NetworkBait]:
    """Serve, on all ``addresses`` of this host, who comes by TCP or UDP; ``many`` is how many make a flood."""
    reached: list[str] = []

    class Stream(socketserver.StreamRequestHandler):
        timeout = 10

        def handle(self) -> None:
            asked = self.rfile.readline() + self.rfile.readline()
            named = OPEN.encode() in asked
            body = b"fine" if named else BAIT
            if asked and not named:
                reached.append(f"TCP from {self.client_address[0]}")
            self.wfile.write(b"HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: 4\r\n\r\n" + body)

    class Datagram(socketserver.DatagramRequestHandler):
        def handle(self) -> None:
            reached.append(f"UDP from {self.client_address[0]}")
            self.wfile.write(BAIT)

    with ExitStack() as stack:
        streams = stack.enter_context(socketserver.ThreadingTCPServer(("0.0.0.0", 0), Stream))
        port = streams.server_address[1]
        datagrams = stack.enter_context(socketserver.ThreadingUDPServer(("0.0.0.0", port), Datagram))
        for server in (streams, datagrams):
            threading.Thread(target=server.serve_forever, daemon=True).start()
            stack.callback(server.shutdown)
        hosts = (NetworkRule(OPEN, port, private=True), *(NetworkRule(name, port) for name in (CLOSED, *_LURES)))
        variables = {"PROBE_PORT": str(port), "PROBE_MANY": str(many), "PROBE_ADDRESSES": " ".join(addresses)}
        yield NetworkBait(variables, NetworkSpec(hosts), reached)
