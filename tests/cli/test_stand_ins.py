"""What libraries seldom use is not imported for them, and is there for who uses it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

PROGRAM = """
import sys
from runner.cli.stand_ins import set_stand_ins
set_stand_ins()
import shutil, trio, trio.testing
assert not {"_ssl", "_bz2", "_lzma"} & sys.modules.keys(), "imported for nothing"

import bz2, hmac, lzma, ssl
assert bz2.decompress(bz2.compress(b"x")) + lzma.decompress(lzma.compress(b"y")) == b"xy"
assert hmac.compare_digest("a", "a")
ends, _ = trio.testing.memory_stream_pair()
assert trio.SSLStream(ends, ssl.create_default_context(), server_hostname="a.test").context.check_hostname
assert isinstance(ssl.SSLError(), OSError) and issubclass(trio._ssl._stdlib_ssl.SSLEOFError, ssl.SSLError)
assert sys.modules["ssl"].__file__
"""


def test_a_library_of_python_that_nobody_uses_is_not_imported_and_is_whole_when_it_is_used(tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, cwd=tmp_path)

    assert (done.returncode, done.stderr) == (0, "")
