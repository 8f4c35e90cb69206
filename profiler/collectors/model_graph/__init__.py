"""Static graphs of models: read in a process of the program's own Python, or from a JSON file.

``child/`` runs there (standard library and torch only), ``collect.py`` starts it, ``json_graph.py`` reads files,
``tables.py`` makes the tables of either.
"""
