#!/usr/bin/env bash
# Builds .venv: a Python >= 3.12, the versions pinned in requirements.txt, this checkout (editable).
#
#   tools/setup.sh            build, or return at once when nothing has changed
#   tools/setup.sh --find     print the Python that would be used
#   tools/setup.sh --packages stop before this checkout: what does not change with its files
#   PYTHON=/path/to/python tools/setup.sh
#   SYSTEM_TORCH=1 tools/setup.sh
#                             keep the torch of that Python, with what was built against it (Apex,
#                             Transformer Engine), as in NVIDIA's images; a .venv built so stays so
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

readonly VENV=.venv
readonly STAMP=$VENV/setup.stamp       # written last: what the finished environment was built from
readonly UNFINISHED=$VENV/setup.unfinished
readonly PROBE='import sys, venv, ensurepip; print(sys.version_info[0] * 100 + sys.version_info[1])'
tried=()

has_system_packages() {
    grep -qs '^include-system-site-packages = true' "$VENV/pyvenv.cfg"
}

if has_system_packages; then
    SYSTEM_TORCH=1
fi
readonly SYSTEM_TORCH=${SYSTEM_TORCH:-0}

# Every Python worth asking, likeliest first. A name on PATH may be a shim that does not run, so a
# candidate counts only once it has answered.
candidates() {
    local name root
    for name in python3.12 python3.13 python3.14 python3 python; do
        command -v "$name" || true
    done
    for root in "${PYENV_ROOT:-}" "${HOME:-}/.pyenv" "$(pyenv root 2>/dev/null || true)"; do
        [[ -n $root ]] && compgen -G "$root/versions/3.*/bin/python3" | sort -rV || true
    done
    for name in 3.12 3.13 '>=3.12'; do
        uv python find "$name" 2>/dev/null || true
    done
}

# Sets `python`. 3.12, then 3.13, come before anything newer, which wheels may not cover yet.
find_python() {
    local newest candidate version seen=' '
    if [[ -n ${PYTHON:-} ]]; then
        version=$("$PYTHON" -c "$PROBE" 2>/dev/null) && ((version >= 312)) && python=$PYTHON && return
        echo "PYTHON=$PYTHON is not a working Python >= 3.12 with venv and ensurepip." >&2
        echo "Set it to the path of one, or unset it to let $0 look for one." >&2
        return 1
    fi
    for newest in 312 313 999; do
        while IFS= read -r candidate; do
            [[ $newest == 999 && $seen != *" $candidate "* ]] && tried+=("$candidate")
            [[ $newest == 999 ]] && seen+="$candidate "
            version=$("$candidate" -c "$PROBE" 2>/dev/null </dev/null) || continue
            ((version >= 312 && version <= newest)) && python=$candidate && return
        done < <(candidates)
    done
    {
        echo "No Python >= 3.12 (with venv and ensurepip) found. Tried: ${tried[*]:-nothing on PATH}"
        echo "Get one, for example:  apt-get install python3.12 python3.12-venv"
        echo "                       pyenv install 3.12      uv python install 3.12"
        echo "or name one you have:  PYTHON=/path/to/python3.12 make setup"
    } >&2
    return 1
}

if [[ ${1:-} == --find ]]; then
    find_python
    echo "$python"
    exit
elif (($#)) && [[ $1 != --packages ]]; then
    echo "$0: unknown argument $1; there are --find and --packages" >&2
    exit 2
fi

# The path belongs to it: neither a virtual environment nor an editable install can be moved.
wanted=$(pwd && cat pyproject.toml setup.py requirements.txt tools/setup.sh | cksum)
[[ $SYSTEM_TORCH == 0 ]] || wanted+=" with the system's torch"
if [[ -f $STAMP && $(<"$STAMP") == "$wanted" ]] && "$VENV/bin/python" -c '' 2>/dev/null; then
    exit
fi

start=$SECONDS
if [[ -f $UNFINISHED ]] || ! "$VENV/bin/python" -c "$PROBE" >/dev/null 2>&1 ||
    { [[ $SYSTEM_TORCH == 1 ]] && ! has_system_packages; }; then
    # Nothing of an interrupted install is worth trusting: start over.
    find_python
    echo "[1/3] $VENV with $("$python" --version) ($python)"
    options=(--clear)
    [[ $SYSTEM_TORCH == 0 ]] || options+=(--system-site-packages)
    "$python" -m venv "${options[@]}" "$VENV"
else
    echo "[1/3] $VENV exists, with $("$VENV/bin/python" --version)"
fi
touch "$UNFINISHED"
rm -f "$STAMP"

if [[ $SYSTEM_TORCH == 1 ]]; then
    # No requirement may bring another torch: the system's own packages were built against this one.
    # The system's own constraints are about its packages, which ours in .venv leave alone.
    constraints=$(mktemp)
    trap 'rm -f "$constraints"' EXIT
    "$VENV/bin/python" -c 'import importlib.metadata as m; print("torch==" + m.version("torch"))' \
        >"$constraints" || {
        echo "SYSTEM_TORCH=1, but $("$VENV/bin/python" --version) there has no torch: unset it" >&2
        exit 1
    }
    echo "[2/3] pinned requirements, with the system's $(<"$constraints")"
    grep -v '^torch==' requirements.txt |
        PIP_CONSTRAINT=$constraints "$VENV/bin/python" -m pip install --disable-pip-version-check \
            --requirement /dev/stdin
else
    echo "[2/3] pinned requirements (torch and its CUDA libraries are several GB)"
    "$VENV/bin/python" -m pip install --disable-pip-version-check --requirement requirements.txt
fi

if [[ ${1:-} == --packages ]]; then
    rm -f "$UNFINISHED"
    exit
fi

echo "[3/3] this checkout"
"$VENV/bin/python" -m pip install --disable-pip-version-check --no-deps --no-build-isolation \
    --quiet --editable .

# Asked from elsewhere: here the checkout's own directories would answer.
python=$PWD/$VENV/bin/python
(cd / && "$python" - megatron.core megatron.training megatron.zero_bubble zero_bubble) <<'EOP'
import importlib.util, sys

missing = [name for name in sys.argv[1:] if importlib.util.find_spec(name) is None]
if missing:
    sys.exit(f"installed, but not importable: {', '.join(missing)}; remove .venv and try again")
EOP

rm -f "$UNFINISHED"
echo "$wanted" >"$STAMP"
echo "Ready in $((SECONDS - start)) s: $VENV/bin/python"
