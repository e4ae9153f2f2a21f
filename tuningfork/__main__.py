"""`python -m tuningfork` and the program `tuningfork`: the command line, which Ctrl-C ends from its first moment on."""

import os
import signal
import sys


def main() -> int:
    """Run the command line; the exit status, see `cli.main`. Its import takes a while in which Ctrl-C may come too."""
    # What models/split_k.py prefers for most runs; where it is set in the running process, PyTorch warns.
    os.environ.setdefault("TORCH_BLAS_PREFER_CUBLASLT", "1")
    try:
        from tuningfork import cli

        return cli.main()
    except KeyboardInterrupt:
        print("tuningfork: interrupted", file=sys.stderr)
        return 130
    finally:  # what follows is Python's own end, which a signal cuts short without a traceback
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_DFL)


if __name__ == "__main__":
    sys.exit(main())
