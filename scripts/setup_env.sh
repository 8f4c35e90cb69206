#!/usr/bin/env bash
# Make the virtual environment and install spikeprof into it, editable.
#
#   scripts/setup_env.sh demo    what `make demo` needs
#   scripts/setup_env.sh test    the same with the test and check tools, torch, triton and, in a container, Redis
#
# PYTHON       interpreter to start from (default: the first of python3, python3.13 ... that is >= 3.11)
# VENV         where the environment goes (default .venv)
# PIP_ARGS     more arguments for every pip install, e.g. an index of CPU builds of torch
# TORCH_SPEC   which torch on a machine without an NVIDIA GPU; empty = none
# TRITON_SPEC  which triton there (x86-64 Linux only); empty = none
#
# A second run does nothing while pyproject.toml, this file and the variables stay the same.
set -euo pipefail
cd "$(dirname "$0")/.."

kind=${1:?usage: scripts/setup_env.sh demo|test}
venv=${VENV:-.venv}
torch_spec=${TORCH_SPEC-torch==2.13.0}
triton_spec=${TRITON_SPEC-triton==3.9.*}
read -ra pip_args <<<"${PIP_ARGS:-}"

fail() { echo "setup: $*" >&2; exit 1; }
is_new_enough() { "$1" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; }

key=$( (cat pyproject.toml scripts/setup_env.sh; echo "$PWD|$kind|$torch_spec|$triton_spec|${PIP_ARGS:-}|${PYTHON:-}") | cksum)
stamp=$venv/.installed-$kind
if [ -f "$stamp" ] && [ "$(cat "$stamp")" = "$key" ]; then exit 0; fi

python=
for candidate in "${PYTHON:-python3}" ${PYTHON:-python3.14 python3.13 python3.12 python3.11}; do
    if is_new_enough "$candidate"; then python=$candidate; break; fi
done
[ -n "$python" ] || fail "no Python >= 3.11 found (tried ${PYTHON:-python3 and newer names}): set PYTHON=/path/to/python3"

has_gpu() { [ -e /dev/nvidiactl ] || command -v nvidia-smi >/dev/null; }
has_torch() { "$1" -c 'import importlib.util as u, sys; sys.exit(u.find_spec("torch") is None)'; }

if [ ! -x "$venv/bin/python" ]; then
    # On a GPU machine a torch that is there already, matched to its driver, is used as it is.
    options=()
    if has_gpu && has_torch "$python"; then options=(--system-site-packages); fi
    "$python" -m venv "${options[@]}" "$venv" || fail "cannot make $venv (on Debian and Ubuntu: apt install python3-venv)"
fi
install() { "$venv/bin/python" -m pip install --quiet --disable-pip-version-check "${pip_args[@]}" "$@"; }

# Whether pip would take a CUDA build, several GB that a machine without a GPU has no use for. Downloads no wheel
# from an index that serves metadata.
would_be_cuda() {
    "$venv/bin/python" -m pip install --quiet --disable-pip-version-check "${pip_args[@]}" \
        --dry-run --no-deps --ignore-installed --report - "$1" | "$venv/bin/python" -c '
import json, sys
(item,) = json.load(sys.stdin)["install"]
needs = " ".join(item["metadata"].get("requires_dist", []))
sys.exit(not (sys.platform == "linux" and "+cpu" not in item["metadata"]["version"] and ("nvidia-" in needs or "cuda-" in needs)))'
}

install_torch() {
    if has_torch "$venv/bin/python"; then return; fi
    if has_gpu; then
        echo "setup: installing torch"
        install torch
        return
    fi
    [ -n "$torch_spec" ] || return 0
    if would_be_cuda "$torch_spec"; then
        echo "setup: no torch, and the tests that need it will be skipped: there is no NVIDIA GPU here, and pip would" \
            "download a CUDA build of $torch_spec; name an index of CPU builds with PIP_ARGS='--extra-index-url ...'" >&2
        return
    fi
    echo "setup: installing $torch_spec (CPU build)"
    install "$torch_spec"
    if [ -n "$triton_spec" ] && [ "$(uname -sm)" = "Linux x86_64" ]; then
        install "$triton_spec" || echo "setup: no $triton_spec to be had; tests that need it will be skipped" >&2
    fi
}

# Only where nothing would start it as a service: in a container.
install_redis() {
    if command -v redis-server >/dev/null; then return; fi
    if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null && [ ! -d /run/systemd/system ]; then
        echo "setup: installing redis-server"
        export DEBIAN_FRONTEND=noninteractive
        local get=(apt-get -qq -o Dpkg::Use-Pty=0)
        { "${get[@]}" install -y redis-server redis-tools || { "${get[@]}" update && "${get[@]}" install -y redis-server redis-tools; }; } \
            >/dev/null 2>&1 && return
    fi
    echo "setup: no redis-server; tests that need it will be skipped (Debian, Ubuntu: apt install redis-server)" >&2
}

case $kind in
    demo) echo "setup: installing spikeprof into $venv"; install -e . ;;
    test) install_torch; install_redis; echo "setup: installing spikeprof and its test tools into $venv"; install -e '.[pierce,test,check]' ;;
    *) fail "usage: scripts/setup_env.sh demo|test" ;;
esac
echo "$key" >"$stamp"
