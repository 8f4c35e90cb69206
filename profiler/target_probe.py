"""Run by ``spikeprof doctor`` inside the Python of the program under test (as ``-c`` text, Python 3.9 syntax).

``sys.argv[1]`` is the folder of ``profiler/inject``; one line of JSON behind ``MARK`` goes to standard output.
Standard library only; torch is looked for, not imported.
"""

import importlib.util
import json
import os
import sys
from pathlib import Path
from typing import Any

MARK = "spikeprof-probe:"

if sys.version_info < (3, 9):  # before anything below that an older Python would trip over
    sys.stdout.write("\n" + MARK + json.dumps({"executable": sys.executable, "version": list(sys.version_info[:3])}))
    sys.exit(0)


def cupti_facts(folder: str) -> dict[str, Any]:
    """What the agent would find: it is asked through its own code."""
    init = Path(folder, "__init__.py")
    spec = importlib.util.spec_from_file_location("_spikeprof", init, submodule_search_locations=[folder])
    assert spec is not None
    assert spec.loader is not None
    package = importlib.util.module_from_spec(spec)
    sys.modules["_spikeprof"] = package
    spec.loader.exec_module(package)
    library = importlib.import_module("_spikeprof.cupti").Cupti()
    found = {"cupti_path": library.path}
    try:
        found["cupti_version"] = library.version()
    except Exception as error:
        found["cupti_version_problem"] = str(error)
    return found


def package_version(name: str) -> str:
    """The version of an installed distribution, or an empty string."""
    from importlib import metadata

    try:
        return metadata.version(name)
    except Exception:
        return ""


def facts() -> dict[str, Any]:
    """Everything that doctor wants to know about this interpreter."""
    folder = sys.argv[1]
    site = str(Path(folder, "site"))
    sitecustomize = getattr(sys.modules.get("sitecustomize"), "__file__", "") or ""
    torch = importlib.util.find_spec("torch")
    found = {
        "executable": sys.executable,
        "version": list(sys.version_info[:3]),
        "no_site": bool(sys.flags.no_site),
        "ignore_environment": bool(sys.flags.ignore_environment),
        # Our sitecustomize takes its own folder off sys.path again: that is how it shows that it ran.
        "injected": site in os.environ.get("PYTHONPATH", "").split(os.pathsep)
        and site not in sys.path
        and not sys.flags.ignore_environment
        and not sys.flags.no_site,
        "sitecustomize": "" if sitecustomize.startswith(site) else sitecustomize,
        "torch_path": (torch.origin or "") if torch else "",
        "torch_version": package_version("torch") if torch else "",
    }
    try:
        found.update(cupti_facts(folder))
    except Exception as error:
        found["cupti_problem"] = str(error)
    return found


if __name__ == "__main__":
    sys.stdout.write("\n" + MARK + json.dumps(facts()) + "\n")
