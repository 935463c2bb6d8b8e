#!/usr/bin/env bash
# Makes a virtual environment for each library that can't live beside rayvec, for the scripts here that take --venvs.
#
#     benchmarks/make_peer_venvs.sh DIRECTORY [PEER...]
#
# A peer whose packages can't be installed is left out.
set -uo pipefail
if [ $# -lt 1 ] || [ "${1#-}" != "$1" ]; then
    sed -n '2,6s/^# \{0,1\}//p' "$0" >&2
    case ${1-} in -h | --help) exit 0 ;; esac
    exit 2
fi
directory=$1
shift
peers=("${@:-stable-baselines3 envpool pufferlib torchrl rllib}")
here=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
mkdir -p "$directory"

packages() {
    case $1 in
        stable-baselines3) echo "stable-baselines3 torch" ;;
        envpool) echo "envpool gymnasium numpy<2" ;;
        pufferlib) echo "ray psutil filelock gym==0.23.0 pettingzoo shimmy" ;;
        torchrl) echo "torchrl torch gymnasium" ;;
        rllib) echo "ray[rllib] torch" ;;
        *)
            echo "unknown peer $1" >&2
            exit 2
            ;;
    esac
}

install() { # VENV PACKAGE...
    "$1/bin/python" -m pip install --quiet --disable-pip-version-check \
        -c <(grep -E '^(torch|ray|psutil)=' "$here/constraints.txt") "${@:2}"
}

for peer in ${peers[*]}; do
    list=$(packages "$peer") || exit 2
    venv="$directory/$peer"
    ${PYTHON:-python3} -m venv "$venv" || exit 1
    if [ "$peer" = pufferlib ]; then # 2.x downloads a library that is no Python package while it is installed
        install "$venv" cython numpy "setuptools<70" wheel &&
            install "$venv" --no-deps --no-build-isolation pufferlib==1.0.1
    fi
    # The environments are the same for all: what Gymnasium and ALE bring.
    # shellcheck disable=SC2086
    if ! install "$venv" $list "gymnasium[mujoco]" ale-py; then
        echo "$peer could not be installed" >&2
        rm -rf "$venv"
    fi
done
