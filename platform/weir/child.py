"""Starts a command so that it does not outlive whoever supervises it. Run as a file, by path.

    python -I -S child.py SUPERVISOR_PID STOP_SIGNAL UID:GID|- COMMAND [ARGUMENT ...]

Imports nothing of ours and is replaced by the command, so it costs a few milliseconds once.
"""

import ctypes
import os
import sys

_PR_SET_PDEATHSIG = 1  # linux/prctl.h


def main() -> None:
    supervisor, stop_signal, user, command = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4:]
    if user != "-":
        uid, gid = map(int, user.split(":"))
        os.setgroups([])
        os.setgid(gid)
        os.setuid(uid)
    if sys.platform == "linux":
        # After setuid, which clears it; exec keeps it. If the supervisor is killed outright, the
        # kernel asks its children to stop.
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, stop_signal)
    if os.getppid() != supervisor:  # it died before the kernel was told
        sys.exit(1)
    os.chdir(os.environ.pop("WEIR_CHILD_CWD", "."))
    try:
        os.execvp(command[0], command)  # noqa: S606 - no shell is the point
    except OSError as error:
        sys.exit(f"can't start {command[0]}: {error}")


if __name__ == "__main__":
    main()
