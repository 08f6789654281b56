"""The command ``coterie``. Outside the package, so that Ctrl-C while that is imported ends in one line too."""

import sys


def main() -> None:
    """Run the command line; an interrupt that nothing else has handled exits with 130."""
    try:
        from coterie.cli import main as run

        run()
    except KeyboardInterrupt:
        sys.stderr.write("stopped by SIGINT\n")
        sys.exit(130)
