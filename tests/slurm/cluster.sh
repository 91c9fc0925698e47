#!/bin/bash
# A private Slurm cluster on this one machine (Debian 12: slurmctld slurmd slurm-client munge iproute2); run as root.
# usage: cluster.sh up | down [--wipe] | status | env | crash N | boot N | unplug N | plug N
#   SLURM_MODE  ns: every node has its own network, hostname, /etc/hosts, pids (default); plain: slurmd -N on this host
#   SLURM_ROOT (${TMPDIR:-/tmp}/ssscale-slurm)  SLURM_NODES (2)  SLURM_CPUS (8)  SLURM_GPUS (8, fake)  SLURM_PORT (17000)  SLURM_NET (10.77.0)
#   SLURM_TASK_PLUGIN (task/none; task/affinity binds, where SLURM_CPUS is what the machine has)
set -u
R=${SLURM_ROOT:-${TMPDIR:-/tmp}/ssscale-slurm}; N=${SLURM_NODES:-2}; CPUS=${SLURM_CPUS:-8}; GPUS=${SLURM_GPUS:-8}; P=${SLURM_PORT:-17000}
MODE=${SLURM_MODE:-ns}; NET=${SLURM_NET:-10.77.0}
[ -s "$R/mode" ] && read -r MODE NET N < "$R/mode"      # a standing cluster keeps what it was made with
BR=sl$(echo "$NET" | tr -d .)
unset ${!SLURM_JOB*} 2>/dev/null
export SLURM_CONF=$R/slurm.conf
H=$(hostname -s)
alive() { [ -s "$1" ] && kill -0 "$(cat "$1")" 2>/dev/null; }
conf() {
  umask 022
  mkdir -p "$R"/{munge,state,log,run}; chmod 755 "$R" "$R/munge"
  echo "$MODE $NET $N" > "$R/mode"
  [ -s "$R/munge/munge.key" ] || (umask 077; head -c 128 /dev/urandom > "$R/munge/munge.key")
  CTL=127.0.0.1; [ "$MODE" = ns ] && CTL=$NET.1
  cat > "$R/slurm.conf" <<C
ClusterName=ci
SlurmctldHost=$H($CTL)
SlurmctldPort=$P
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
CredType=cred/munge
AuthInfo=socket=$R/munge/munge.socket,cred_expire=5
StateSaveLocation=$R/state
SlurmctldPidFile=$R/run/slurmctld.pid
SlurmctldLogFile=$R/log/slurmctld.log
SlurmdPidFile=$([ "$MODE" = ns ] && echo "$R/spool.%n/slurmd.pid" || echo "$R/run/slurmd.%n.pid")
SlurmdLogFile=$R/log/slurmd.%n.log
SlurmdSpoolDir=$R/spool.%n
SlurmctldDebug=verbose
SlurmdDebug=verbose
ProctrackType=${SLURM_PROCTRACK:-proctrack/linuxproc}
TaskPlugin=${SLURM_TASK_PLUGIN:-task/none}
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
JobCompType=jobcomp/filetxt
JobCompLoc=$R/log/jobcomp.txt
MpiDefault=none
MailProg=/bin/true
SlurmdParameters=config_overrides
SchedulerType=sched/backfill
SchedulerParameters=sched_interval=1,bf_interval=1,batch_sched_delay=0,sched_min_interval=0
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
GresTypes=gpu
ReturnToService=2
JobRequeue=1
KillWait=${SLURM_KILLWAIT:-5}
MinJobAge=3600
SlurmdTimeout=${SLURM_SLURMD_TIMEOUT:-10}
SlurmctldTimeout=60
MessageTimeout=10
${SLURM_EXTRA_CONF:-}
C
  for i in $(seq 1 "$N"); do
    if [ "$MODE" = ns ]; then echo "NodeName=node$i NodeAddr=$NET.$((10+i)) Port=$((P+1)) CPUs=$CPUS RealMemory=20000 Gres=gpu:$GPUS"
    else echo "NodeName=node$i NodeHostname=$H NodeAddr=127.0.0.1 Port=$((P+i)) CPUs=$CPUS RealMemory=20000 Gres=gpu:$GPUS"; fi
  done >> "$R/slurm.conf"
  echo "PartitionName=ci Nodes=node[1-$N] Default=YES MaxTime=INFINITE DefaultTime=10 GraceTime=${SLURM_GRACE:-20} State=UP" >> "$R/slurm.conf"
  : > "$R/cgroup.conf"      # may be empty: nothing here uses cgroups
  : > "$R/gres.conf"        # fake GPUs: character devices (a plain file is refused)
  if [ "$GPUS" -gt 0 ]; then
    for g in $(seq 0 $((GPUS-1))); do [ -c "$R/run/nvidia$g" ] || mknod "$R/run/nvidia$g" c 1 3; done
    echo "Name=gpu File=$R/run/nvidia[0-$((GPUS-1))]" > "$R/gres.conf"
  fi
  { echo "127.0.0.1 localhost"; echo "$CTL $H"; for i in $(seq 1 "$N"); do [ "$MODE" = ns ] && echo "$NET.$((10+i)) node$i" || echo "127.0.0.1 node$i"; done; } > "$R/hosts"
}
boot() {  # start node $1
  local i=$1 n=node$1 v=$BR-$1 pid; mkdir -p "$R/spool.$n"
  if [ "$MODE" = plain ]; then   # own mount namespace only, for /etc/hosts
    alive "$R/run/slurmd.$n.pid" || unshare --mount bash -c "mount --bind $R/hosts /etc/hosts && exec slurmd -f $SLURM_CONF -N $n"; return
  fi
  alive "$R/run/$n.ns.pid" && return 0
  # pid 1 of the node is a small bash which reaps; unshare dies -> it dies (--kill-child) -> everything in the node dies
  setsid unshare --fork --kill-child --pid --mount-proc --mount --uts --net bash -c "
    hostname $n; mount --bind $R/hosts /etc/hosts; mount --bind /dev/null /etc/resolv.conf; mount -t tmpfs tmpfs /dev/shm; ip link set lo up
    for _ in \$(seq 100); do ip link show eth0 >/dev/null 2>&1 && break; sleep 0.05; done
    ip addr add $NET.$((10+i))/24 dev eth0; ip link set eth0 up
    slurmd -D -f $SLURM_CONF -N $n & trap 'kill \$!' TERM; while kill -0 \$! 2>/dev/null; do wait; done" \
    >> "$R/log/$n.console" 2>&1 < /dev/null &
  pid=$!; echo $pid > "$R/run/$n.ns.pid"
  for _ in $(seq 100); do c=$(cat /proc/$pid/task/$pid/children 2>/dev/null); [ -n "$c" ] && [ "$(readlink /proc/${c% }/ns/net)" != "$(readlink /proc/self/ns/net)" ] && break; sleep 0.02; done
  ip link add "$v" type veth peer name eth0 netns "${c% }" && ip link set "$v" master "$BR" up
}
up() {
  conf
  alive "$R/run/munged.pid" || munged --key-file="$R/munge/munge.key" --socket="$R/munge/munge.socket" \
      --pid-file="$R/run/munged.pid" --log-file="$R/log/munged.log" --seed-file="$R/munge/munged.seed" || return 1
  if [ "$MODE" = ns ]; then
    ip link show "$BR" >/dev/null 2>&1 || { ip link add "$BR" type bridge && ip addr add "$CTL/24" dev "$BR" && ip link set "$BR" up; } || return 1
  fi
  alive "$R/run/slurmctld.pid" || slurmctld -f "$SLURM_CONF" || return 1
  for i in $(seq 1 "$N"); do boot "$i" || return 1; done
  for _ in $(seq 1 150); do
    [ "$(sinfo -h -N -t idle,mix,alloc -o '%N %t' 2>/dev/null | grep -v '\*' | sort -u | wc -l)" = "$N" ] && return 0
    sleep 0.2
  done
  echo "nodes did not come up" >&2; sinfo -N -l >&2; return 1
}
down() {
  if alive "$R/run/slurmctld.pid" && [ -n "$(squeue -h 2>/dev/null)" ]; then
    scancel -s KILL --full -u "$(id -un)" 2>/dev/null; scancel -u "$(id -un)" 2>/dev/null
    for _ in $(seq 1 50); do [ -z "$(squeue -h 2>/dev/null)" ] && break; sleep 0.2; done
  fi
  local p ps=""
  for f in "$R"/run/slurmd.*.pid; do [ "$MODE" = plain ] && alive "$f" && { p=$(cat "$f"); kill "$p"; ps="$ps $p"; }; done
  for f in "$R"/run/node*.ns.pid; do alive "$f" && { p=$(cat "$f"); kill -9 "$p"; ps="$ps $p"; }; done   # takes all of the node with it
  for f in "$R/run/slurmctld.pid" "$R/run/munged.pid"; do alive "$f" && { p=$(cat "$f"); kill "$p"; ps="$ps $p"; }; done
  for _ in $(seq 1 100); do
    local left=""; for p in $ps; do kill -0 "$p" 2>/dev/null && left="$left $p"; done
    ps=$left; [ -z "$ps" ] && break; sleep 0.1
  done
  for p in $ps; do kill -9 "$p" 2>/dev/null && echo "had to kill -9 $p" >&2; done
  rm -f "$R"/run/*.pid
  grep -q ^ProctrackType=proctrack/cgroup "$SLURM_CONF" 2>/dev/null && for i in $(seq 1 "$N"); do   # cgroup v1 leftovers
    find /sys/fs/cgroup/freezer/slurm_node$i -depth -type d -exec rmdir {} + 2>/dev/null; done
  [ "$MODE" = ns ] && ip link del "$BR" 2>/dev/null
  [ "${1:-}" = --wipe ] && rm -rf "$R"
  return 0
}
case ${1:-} in
  up) up;;
  down) shift; down "$@";;
  status) for f in "$R"/run/*.pid; do alive "$f" && echo "$(basename "$f" .pid) $(cat "$f") up" || echo "$(basename "$f" .pid) down"; done; sinfo -N -l; squeue;;
  env) echo "export SLURM_CONF=$SLURM_CONF";;
  crash) kill -9 "$(cat "$R/run/node$2.ns.pid")"; rm -f "$R/run/node$2.ns.pid";;   # power cut
  boot) boot "$2";;
  unplug) ip link set "$BR-$2" down;;                                             # network cable out
  plug) ip link set "$BR-$2" up;;
  *) sed -n 2,6p "$0"; exit 2;;
esac
