"""What a process that `tuningfork launch` has started does so that it never outlives its launcher."""

from __future__ import annotations

import ctypes
import os
import signal
import sys

LAUNCHER = "TUNINGFORK_LAUNCHER"
"""In the environment of such a process: the number of the launcher's."""

_SET_PARENT_DEATH_SIGNAL = 1  # PR_SET_PDEATHSIG, prctl(2)


def end_with_launcher() -> None:
    """From now on stop as at SIGTERM once the launcher is gone, also where it is killed and can pass nothing on.

    Linux only, and of no effect in a process that no launcher has started itself.
    """
    launcher = os.environ.pop(LAUNCHER, None)  # processes that this one starts are not the launcher's
    if launcher is None or not sys.platform.startswith("linux"):
        return
    ctypes.CDLL(None).prctl(_SET_PARENT_DEATH_SIGNAL, signal.SIGTERM)
    if os.getppid() != int(launcher):  # gone before that
        os.kill(os.getpid(), signal.SIGTERM)
