# The common part of the job scripts. Each sources it with its own arguments, in the root of the repository. It sets:
# arguments (without the options below), python, cpus (per task), srun (the command with its flags), and functions.
#   env=FILE         the file to source instead of slurm/env.sh
#   interface=NAME   the network interface between the nodes, for NCCL and gloo; or several: ib0,ib1
#   srun=FLAGS       further flags of srun, as one text: srun="--container-image=IMAGE"
fail() {
  echo "error: $*" >&2
  exit 2
}

env_file="" interface="" srun_flags="" arguments=()
for argument in "$@"; do
  case $argument in
    env=*)
      env_file=${argument#*=}
      [ -f "$env_file" ] || fail "env=$env_file: $(hostname) has no such file"
      ;;
    interface=*) interface=${argument#*=} ;;
    srun=*) srun_flags=${argument#*=} ;;
    *) arguments+=("$argument") ;;
  esac
done
unset MASTER_ADDR  # another job may have left it in the environment of sbatch; env.sh may set it
. slurm/load_env.sh
if [ -z "$srun_flags" ] && ! command -v "$python" >/dev/null; then
  fail "$(hostname) has no $python: run make setup, or set SSSCALE_PYTHON in slurm/env.sh"
fi

# CPUs per task: as requested, or the share on the smallest node. Since Slurm 22.05, srun does not inherit them from
# sbatch.
numbers() { tr ',' '\n' <<<"$1" | sed 's/(.*//' | sort -n; }  # of lists such as 72(x2),36
cpus=${SLURM_CPUS_PER_TASK:-}
if [ -z "$cpus" ]; then
  cpus=$(($(numbers "${SLURM_JOB_CPUS_PER_NODE:-1}" | head -n 1) / $(numbers "${SLURM_TASKS_PER_NODE:-1}" | tail -n 1)))
  [ "$cpus" -ge 1 ] || cpus=1
fi
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-$cpus}

if [ -n "$interface" ]; then
  for name in ${interface//,/ }; do
    grep -q "^ *$name:" /proc/net/dev ||
      fail "interface=$interface: $(hostname) has only $(sed -n 's/^ *\([^ :]*\):.*/\1/p' /proc/net/dev | paste -sd ' ')"
  done
  export NCCL_SOCKET_IFNAME=$interface GLOO_SOCKET_IFNAME=$interface
fi
export NCCL_DEBUG=${NCCL_DEBUG:-WARN}

# Compiled kernels and data.cache=auto use the node's own disk. A home folder on the network is slow for many small
# files, and ranks of many nodes would write to it at once. A requeued job finds its files again if it gets the same
# nodes.
scratch_is_ours=$([ -z "${SSSCALE_SCRATCH:-}" ] && echo 1)
export SSSCALE_SCRATCH=${SSSCALE_SCRATCH:-${SLURM_TMPDIR:-${TMPDIR:-/tmp}}/ssscale-${SLURM_JOB_ID:-$$}}
mkdir -p "$SSSCALE_SCRATCH" || fail "$(hostname) cannot make $SSSCALE_SCRATCH: set SSSCALE_SCRATCH in slurm/env.sh"
export TRITON_CACHE_DIR=${TRITON_CACHE_DIR:-$SSSCALE_SCRATCH/triton}
export TORCHINDUCTOR_CACHE_DIR=${TORCHINDUCTOR_CACHE_DIR:-$SSSCALE_SCRATCH/inductor}

srun=(srun --mpi=none)
ranks=("${srun[@]}" --cpus-per-task="$cpus" --kill-on-bad-exit=1)
if [ -n "$srun_flags" ]; then
  mapfile -t words < <(xargs -n 1 printf '%s\n' <<<"$srun_flags")  # xargs interprets quotes as a shell does
  ranks+=("${words[@]}")
fi

# The rendezvous is on the first node. It is looked up here because a container has no scontrol.
rendezvous() {
  [ -n "${MASTER_ADDR:-}" ] || MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
  [ -n "$MASTER_ADDR" ] || fail "scontrol show hostnames $SLURM_JOB_NODELIST gives no host: set MASTER_ADDR in slurm/env.sh"
  export MASTER_ADDR
}

# Runs at the end of a job that is not queued again. The cluster cleans up after cancelled jobs, as for all of /tmp.
clean_up() {
  [ -n "$scratch_is_ours" ] || return 0
  if [ "${SLURM_JOB_NUM_NODES:-1}" -gt 1 ]; then
    timeout 60 "${srun[@]}" --nodes="$SLURM_JOB_NUM_NODES" --ntasks="$SLURM_JOB_NUM_NODES" --ntasks-per-node=1 \
      --cpus-per-task=1 --overlap rm -rf -- "$SSSCALE_SCRATCH" 2>/dev/null || true
  fi
  rm -rf -- "$SSSCALE_SCRATCH"
}
