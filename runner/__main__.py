"""The program, and what it says where it cannot run: nothing that only Linux has is imported before that is known."""

import atexit
import os
import sys

from runner.core.errors import NotLinux

_ELSEWHERE = {
    "darwin": "start a virtual machine: `limactl start`, then `limactl shell default`; or use a devcontainer",
    "win32": "use WSL 2: `wsl --install`, then `wsl`; or use a devcontainer",
}


def entry() -> int:
    if sys.platform != "linux":
        hint = _ELSEWHERE.get(sys.platform, "start a virtual machine with Linux")
        error = NotLinux(f"runner works on Linux only, and this is `{sys.platform}`", hint=hint)
        sys.stderr.write(f"error[{error.code}]: {error.message}\n  = hint: {error.hint}\n")
        return error.exit_code
    from runner.cli.main import entry as start

    return _end(start())


def _end(code: int) -> int:
    """End the process as the interpreter would, but without taking itself down, which takes longer than a short verb.

    Objects need not be freed one by one: the kernel takes the memory. Returns where the interpreter has more to do, or
    to say: for a thread that it waits for, for what watches this process, and for output that cannot be written.
    """
    threading = sys.modules.get("threading")  # whoever starts a thread has imported it
    main = threading and threading.main_thread()
    if threading and any(not each.daemon for each in threading.enumerate() if each is not main):
        return code
    if sys.gettrace() or sys.getprofile():
        return code
    atexit._run_exitfuncs()
    try:
        sys.stdout.flush()
        sys.stderr.flush()
    except OSError:
        return code
    os._exit(code)


if __name__ == "__main__":
    raise SystemExit(entry())
