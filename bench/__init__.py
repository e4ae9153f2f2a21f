"""Speed, measured. README.md says which program measures what."""

import os

os.environ.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")  # as the command line does for a run
