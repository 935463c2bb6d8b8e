#!/usr/bin/env bash
# Trains on the nodes of a Slurm job. Options of `rayvec train ppo` follow the script's name:
#
#     sbatch --nodes=4 examples/cluster/slurm.sh --env-id HalfCheetah-v5 --total-steps 10000000
#
# Slurm may requeue the job: before its time limit, after a node failure, or for a job of higher priority. It then
# resumes from its last checkpoint. Submit it from a directory that all nodes share, with rayvec in the PATH.

#SBATCH --job-name=rayvec
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --cpus-per-task=8
#SBATCH --exclusive
#SBATCH --time=04:00:00
#SBATCH --signal=B:USR1@180
#SBATCH --requeue
#SBATCH --open-mode=append

set -euo pipefail
umask 077

run_dir="${RUN_DIR:-$SLURM_SUBMIT_DIR/runs/slurm-$SLURM_JOB_ID}"
address="$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1):${RAY_PORT:-6379}"

# Every process of the cluster shows this token; only you can read the file.
mkdir -p "$(dirname "$run_dir")"
export RAY_AUTH_MODE=token RAY_AUTH_TOKEN_PATH="$run_dir.token"
[ -s "$RAY_AUTH_TOKEN_PATH" ] || python3 -c 'import secrets; print(secrets.token_hex(32))' >"$RAY_AUTH_TOKEN_PATH"

export RAY_worker_niceness=0 RAY_SYMMETRIC_RUN_CLUSTER_WAIT_TIMEOUT=120
export RAY_health_check_period_ms=1000 RAY_health_check_timeout_ms=5000 # notices in 30 s that a node is gone
# The other nodes exit when the first one has not answered for RECONNECT_S seconds, by default 20.
export RAY_gcs_rpc_server_reconnect_timeout_s="${RECONNECT_S:-20}"
ulimit -n "$(ulimit -Hn)"

ranks=(--learners decentralized --num-learners "$SLURM_JOB_NUM_NODES")
where=(--address "$address" --num-nodes "$SLURM_JOB_NUM_NODES")
if [ -e "$run_dir/checkpoint.pt" ]; then
	command=(rayvec train ppo --resume "$run_dir" "${ranks[@]}" "${where[@]}")
else
	command=(rayvec train ppo --run-dir "$run_dir" "${ranks[@]}" "${where[@]}" "$@")
fi

# Three minutes before the time limit Slurm sends USR1 to this script, which puts the job into the queue again.
requeue() {
	echo "the time limit is near: requeueing job $SLURM_JOB_ID" >&2
	scontrol requeue "$SLURM_JOB_ID"
}
trap requeue USR1

# The job has the exit code of the training: Ray on the other nodes may exit with an error once the first one is gone.
exit_code="$run_dir.exit-code"
rm -f "$exit_code"
srun ray symmetric-run --address "$address" --min-nodes "$SLURM_JOB_NUM_NODES" \
	--num-cpus "$SLURM_CPUS_PER_TASK" --disable-usage-stats -- sh -c '"$@"; echo $? >"$0"' "$exit_code" "${command[@]}" &
run=$!
until wait "$run"; do # USR1 ends a wait, too, but not the run
	code=$?
	kill -0 "$run" 2>/dev/null || exit "$(cat "$exit_code" 2>/dev/null || echo "$code")"
done
exit "$(cat "$exit_code")"
