"""`bitsparse bench codec` as a script: the same options, the same results."""

import sys

from bitsparse.cli import main

if __name__ == "__main__":
    sys.argv[1:1] = ["bench", "codec"]
    main()
