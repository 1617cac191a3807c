"""``python -m compile_callbacks``."""

import sys

from compile_callbacks.cli import main

if __name__ == "__main__":
    sys.exit(main())
