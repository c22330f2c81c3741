"""``python -m marlinq`` is the ``marlinq`` command."""

from marlinq.cli import main

if __name__ == "__main__":
    main()
