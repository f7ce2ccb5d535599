"""The script form of `comera train`, for launchers: `python -m comera_rec.train --config FILE [section.key=value ...]`."""

import sys

from comera_rec.__main__ import main

if __name__ == "__main__":
    main(["train", *sys.argv[1:]])
