"""Write patches in git's format without git: text where both sides are short text, else literals."""

from __future__ import annotations

import base64
import difflib
import zlib
from collections.abc import Callable, Iterator
from typing import IO

from runner.ports.git import TreeEntry

_TEXT_BYTES = 1 << 18  # comparing lines is quadratic; what is longer goes as a literal
_LINE = 52  # bytes of a literal in one line
_LENGTHS = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"
_ABSENT = "0" * 40


def write_change(
    file: IO[bytes], path: bytes, old: TreeEntry | None, new: TreeEntry | None, content: Callable[[TreeEntry], bytes]
) -> None:
    """Append the change of one path. As in git, a change of type is a deletion and a creation."""
    if old and new and old.mode & 0o170000 != new.mode & 0o170000:
        write_change(file, path, old, None, content)
        write_change(file, path, None, new, content)
        return
    left, right = _quoted(b"a/" + path), _quoted(b"b/" + path)
    file.write(b"diff --git %s %s\n" % (left, right))
    if old is None and new is not None:
        file.write(b"new file mode %o\n" % new.mode)
    elif new is None and old is not None:
        file.write(b"deleted file mode %o\n" % old.mode)
    elif old and new and old.mode != new.mode:
        file.write(b"old mode %o\nnew mode %o\n" % (old.mode, new.mode))
    if old and new and old.id == new.id:
        return
    mode = b" %o" % new.mode if old and new and old.mode == new.mode else b""
    ids = ((old.id if old else _ABSENT).encode(), (new.id if new else _ABSENT).encode())
    file.write(b"index %s..%s%s\n" % (*ids, mode))
    before, after = content(old) if old else b"", content(new) if new else b""
    if _is_text(before) and _is_text(after):
        file.writelines(_unified(before, after, left if old else b"/dev/null", right if new else b"/dev/null"))
    else:
        file.write(b"GIT binary patch\n")
        for side in (after, before):
            file.write(b"literal %d\n" % len(side))
            file.writelines(_literal(side))
            file.write(b"\n")


def _is_text(content: bytes) -> bool:
    return len(content) < _TEXT_BYTES and b"\0" not in content


def _unified(before: bytes, after: bytes, left: bytes, right: bytes) -> Iterator[bytes]:
    lines = difflib.diff_bytes(
        difflib.unified_diff, _lines(before), _lines(after), left + _end(left), right + _end(right), lineterm=b"\n"
    )
    for line in lines:
        yield line if line.endswith(b"\n") else line + b"\n\\ No newline at end of file\n"


def _lines(content: bytes) -> list[bytes]:
    lines = content.split(b"\n")
    last = lines.pop()
    return [line + b"\n" for line in lines] + ([last] if last else [])


def _end(name: bytes) -> bytes:
    return b"\t" if b" " in name else b""  # as git does: a name with a space ends with a tab


def _literal(content: bytes) -> Iterator[bytes]:
    packed = zlib.compress(content)
    for start in range(0, len(packed), _LINE):
        part = packed[start : start + _LINE]
        yield _LENGTHS[len(part) - 1 : len(part)] + base64.b85encode(part, pad=True) + b"\n"


def _quoted(path: bytes) -> bytes:
    """Return a name as git writes it: in C quotes when one of its bytes needs them."""
    if all(0x20 <= byte < 0x7F and byte not in b'"\\' for byte in path):
        return path
    return b'"%s"' % b"".join(
        bytes([byte]) if 0x20 <= byte < 0x7F and byte not in b'"\\' else b"\\%03o" % byte for byte in path
    )
