"""Started by the interpreter in every Python process under ``spikeprof run``.

Loads the agent as the private package ``_spikeprof``, then hands over to the sitecustomize that the
environment would have run without us. Nothing that goes wrong here may reach the program.
"""

import os
import sys


def _load_agent() -> None:
    # What importlib.util is made of; importing that would bring thirty modules into every process.
    from _frozen_importlib import module_from_spec
    from _frozen_importlib_external import spec_from_file_location

    here = os.path.dirname(os.path.abspath(__file__))
    folder = os.path.dirname(here)
    spec = spec_from_file_location(
        "_spikeprof", os.path.join(folder, "__init__.py"), submodule_search_locations=[folder]
    )
    assert spec is not None
    assert spec.loader is not None
    package = module_from_spec(spec)
    sys.modules["_spikeprof"] = package
    spec.loader.exec_module(package)
    from _spikeprof import hooks  # type: ignore[import-not-found]

    hooks.install()


def _chain() -> None:
    """Run the sitecustomize that we stand in front of; where there is none, fail to be found as it would have."""
    here = os.path.dirname(os.path.abspath(__file__))
    # The program's own sys.path must look as it would without us.
    sys.path[:] = [entry for entry in sys.path if os.path.abspath(entry or ".") != here]
    sys.path_importer_cache.pop(here, None)
    del sys.modules["sitecustomize"]
    import sitecustomize  # type: ignore[import-not-found]  # noqa: F401


if os.environ.get("SPIKEPROF_SPOOL"):
    try:
        _load_agent()
    except Exception as error:
        if os.environ.get("SPIKEPROF_DEBUG"):
            sys.stderr.write("spikeprof: not traced: %s: %s\n" % (type(error).__name__, error))
_chain()
