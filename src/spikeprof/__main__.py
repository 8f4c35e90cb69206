"""``python -m spikeprof``: the same as the ``spikeprof`` command."""

from spikeprof.cli.app import main

if __name__ == "__main__":
    main()
