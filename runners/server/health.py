"""Whether a server answers at the port of the image, with TLS or without; its certificate names other hosts."""

import ssl
import sys
import urllib.request
from http.client import HTTPException


def answers(scheme: str) -> bool:
    no_proxy = urllib.request.ProxyHandler({})  # the variables of the container name one for other hosts
    unverified = urllib.request.HTTPSHandler(context=ssl._create_unverified_context())
    try:
        with urllib.request.build_opener(no_proxy, unverified).open(f"{scheme}://127.0.0.1:8700/healthz", timeout=2):
            return True
    except (OSError, HTTPException):
        return False


sys.exit(not (answers("http") or answers("https")))
