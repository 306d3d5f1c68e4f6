"""Clean text through a redactor, beside ``cat`` of the same, for several kinds of secrets.

Run: ``python tests/benchmarks/bench_redact.py``. Prints medians of MB a second of CPU; asserts nothing.
"""

from __future__ import annotations

import base64
import random
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import runner
from runner.core.redact import Redactor
from tests.benchmarks.measure import cost
from tests.benchmarks.sizes import rounds

ROUNDS = rounds(5)
CHUNK = 1 << 16
SIZE = 32 << 20

LUCK = random.Random(1)
LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789"


def word(length: int) -> bytes:
    return "".join(LUCK.choices(LETTERS, k=length)).encode()


KEY = b"\n".join(base64.b64encode(LUCK.randbytes(48)) for _ in range(26))
KINDS = {
    "a token of 40": {"TOKEN": word(40)},
    "eight tokens of 40": {f"TOKEN{number}": word(40) for number in range(8)},
    "three passwords of 24": {f"PASSWORD{number}": word(24) for number in range(3)},
    "a password of 12": {"PASSWORD": word(12)},
    "a password of 8": {"PASSWORD": word(8)},
    "a private key": {"KEY": b"-----BEGIN PRIVATE KEY-----\n" + KEY + b"\n-----END PRIVATE KEY-----\n"},
}


def passed(redactor: Redactor, text: bytes, size: int) -> None:
    stream = redactor.stream()
    shown = sum(len(stream.feed(text[at : at + size])) for at in range(0, len(text), size))
    assert shown + len(stream.end()) == len(text)


def squeezed(text: bytes) -> None:
    for at in range(0, len(text), CHUNK):
        text[at : at + CHUNK].translate(None, b" \t\r\n")


def measure(action: Callable[[], object]) -> float:
    """MB a second of CPU."""
    return SIZE / 1e6 / statistics.median(cost(action)[1] for _ in range(ROUNDS))


def main() -> None:
    sources = b"".join(path.read_bytes() for path in sorted(Path(runner.__file__).parent.rglob("*.py")))
    text = (sources * (SIZE // len(sources) + 1))[:SIZE]
    print(f"{SIZE >> 20} MiB of source text in chunks of {CHUNK >> 10} KiB, MB a second of CPU")
    with tempfile.NamedTemporaryFile() as file:
        file.write(text)
        file.flush()
        copy = f"cat {file.name} | cat >/dev/null"
        print(f"  cat: {measure(lambda: subprocess.run(['sh', '-c', copy], check=True)):.0f}")
    print(f"  deleting white space in a bare loop: {measure(lambda: squeezed(text)):.0f}")
    for name, secrets in KINDS.items():
        began = time.process_time()
        redactor = Redactor(secrets)
        made = time.process_time() - began
        print(f"  {name}: {measure(lambda: passed(redactor, text, CHUNK)):.0f}, {made * 1e3:.1f} ms to know them")  # noqa: B023
    redactor = Redactor(KINDS["a token of 40"])
    print(f"  a token of 40, chunks of 4 KiB: {measure(lambda: passed(redactor, text, 4096)):.0f}")


if __name__ == "__main__":
    main()
