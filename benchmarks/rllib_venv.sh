#!/bin/sh
# Makes a virtual environment for RLlib, which pins other versions than ours: benchmarks/rllib_venv.sh DIRECTORY
set -eu
directory=${1:?usage: benchmarks/rllib_venv.sh DIRECTORY}
here=$(dirname "$0")
python3 -m venv "$directory"
torch=$(grep -E '^(--extra-index-url|torch==)' "$here/../constraints.txt" || true)
printf '%s\n' "$torch" > "$directory/torch.txt"
"$directory/bin/python" -m pip install --quiet --disable-pip-version-check -r "$directory/torch.txt" "ray[rllib]==2.60.0"
"$directory/bin/python" -c "import ray, gymnasium, torch; print('ray', ray.__version__, 'gymnasium', gymnasium.__version__, 'torch', torch.__version__)"
