#!/usr/bin/env bash
# Submits a training to a Ray cluster that runs, from a machine that reaches its dashboard (port 8265):
#
#     pip wheel --no-deps --wheel-dir . CHECKOUT      # once; the working directory goes with the job
#     RAY_AUTH_TOKEN_PATH=token examples/cluster/submit.sh http://head:8265 --env-id CartPole-v1 --num-nodes 3
#
# Environments of your own in the working directory are found: --env-id my_module:MyEnv-v0.

set -euo pipefail

address="${1:?the address of the dashboard, such as http://head:8265}"
shift
: "${RAY_AUTH_TOKEN_PATH:?the file that holds the token of the cluster}"
export RAY_AUTH_MODE=token RAY_AUTH_TOKEN_PATH

here="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
exec ray job submit --address "$address" --working-dir . --runtime-env "$here/runtime_env.yaml" -- \
	rayvec train ppo --address auto "$@"
