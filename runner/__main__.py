"""The program, and what it says where it cannot run: nothing that only Linux has is imported before that is known."""

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

    return start()


if __name__ == "__main__":
    raise SystemExit(entry())
