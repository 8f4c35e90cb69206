"""Questions asked of a Trace. One file each; see ``base.py`` for the contract and ``registry.py`` for the list."""
