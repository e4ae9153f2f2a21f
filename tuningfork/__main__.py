"""`python -m tuningfork`: the command line where no `tuningfork` is on the path."""

import sys

from tuningfork.cli import main

sys.exit(main())
