"""Takes from this process what Python does not have on Windows: import it before anything of Celery or this package.

The system itself stays what it is: sockets, files and threads work.
"""

from __future__ import annotations

import os
import platform
import select
import signal
import socket
import sys
import time
from importlib import import_module
from unittest.mock import MagicMock

#: These would look for a part of Windows as they are imported.
BEFORE = "asyncio click ctypes dateutil.tz multiprocessing selectors subprocess tempfile threading zoneinfo"

MISSING = "fcntl grp psutil pwd resource syslog termios tty"

#: Parts of Windows that Celery and billiard import there.
FAKED = "_multiprocessing _winapi billiard._win msvcrt winreg"

NAMES = {
    os: """O_CLOEXEC O_NONBLOCK WIFEXITED WNOHANG chown fchown fork forkpty getegid geteuid getgid getloadavg getpgid
        getpgrp getsid getuid killpg mkfifo nice openpty pidfd_open register_at_fork set_blocking setpgid setsid statvfs
        uname wait wait3 wait4""",
    select: "EPOLLERR EPOLLHUP EPOLLIN EPOLLOUT PIPE_BUF POLLIN POLLOUT epoll poll",
    signal: """ITIMER_REAL SIGALRM SIGCHLD SIGCONT SIGHUP SIGKILL SIGPIPE SIGQUIT SIGSTOP SIGTSTP SIGTTIN SIGTTOU
        SIGUSR1 SIGUSR2 SIGWINCH alarm pause pidfd_send_signal pthread_kill setitimer sigwait""",
    socket: "AF_UNIX SO_REUSEPORT",
    time: "CLOCK_BOOTTIME clock_gettime",
}

for module in BEFORE.split():
    import_module(module)
for owner, names in NAMES.items():
    for name in names.split():
        vars(owner).pop(name, None)
for module in MISSING.split():
    sys.modules[module] = None  # type: ignore[assignment]
for module in FAKED.split():
    sys.modules[module] = MagicMock(name=module)
sys.platform = "win32"
platform.system = lambda: "Windows"
