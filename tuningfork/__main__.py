"""`python -m tuningfork` and the program `tuningfork`: the command line, which Ctrl-C ends from its first moment on."""

import signal
import sys


def main() -> int:
    """Run the command line; the exit status, see `cli.main`. Its import takes a while in which Ctrl-C may come too."""
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
