"""``python -m marlinq`` is the ``marlinq`` command."""

import os
import sys

# ``-m`` lets the current folder come first among those that packages are imported from. A downloaded model
# may hold a ``torch.py``. Only where marlinq itself is run from its source folder does the folder stay.
_HERE, _OWN = os.path.realpath(""), os.path.realpath(f"{__file__}/../..")
if not sys.flags.safe_path and os.path.realpath(sys.path[0]) == _HERE != _OWN:
    del sys.path[0]

from marlinq.cli import main  # noqa: E402 - imports come from the folders that are left

if __name__ == "__main__":
    main()
