#!/bin/bash
# usage: slurm_lab.sh up|down DIR [PORT PORT PORT]
#
# A real Slurm of two nodes, n1 and n2, on this machine's loopback: 2 CPUs and 4 pretended GPUs each.
# For any user, without systemd. The ports are the controller's and the nodes'; SLURM_CONF is
# DIR/slurm.conf. Where namespaces of one's own are allowed, n2 sees none of the other processes,
# DIR/apart is another folder there, and all of n2 ends at once with the process in DIR/n2.pid.
set -euo pipefail
D=$(realpath -m "$2") S=$D/munge/munge.sock U=$(id -un) HOST=$(hostname -s)
export SLURM_CONF=$D/slurm.conf PATH=$PATH:/usr/sbin:/sbin
if [ "$1" = down ]; then
  for name in slurmd.n1 slurmctld munge/munged; do
    kill "$(cat "$D/$name.pid")" 2>/dev/null || :
  done
  kill -9 "$(cat "$D/n2.pid")" 2>/dev/null || :
  exit
fi
mkdir -p "$D"/{state,spool,log,munge,apart}
chmod 755 "$D" "$D/munge"
(umask 077; head -c 1024 /dev/urandom > "$D/munge/key")
for i in 0 1 2 3; do ln -sf /dev/null "$D/gpu$i"; done
# cred_expire is also how long a job that is queued again is kept waiting, 120 s by default.
cat > "$SLURM_CONF" <<C
ClusterName=lab
SlurmctldHost=$HOST(127.0.0.1)
SlurmctldPort=$3
SlurmUser=$U
SlurmdUser=$U
AuthType=auth/munge
AuthInfo=socket=$S,cred_expire=5
CommunicationParameters=NoCtldInAddrAny
SlurmctldPidFile=$D/slurmctld.pid
SlurmdPidFile=$D/slurmd.%n.pid
SlurmctldLogFile=$D/log/slurmctld.log
SlurmdLogFile=$D/log/slurmd.%n.log
StateSaveLocation=$D/state
SlurmdSpoolDir=$D/spool/%n
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
SwitchType=switch/none
JobAcctGatherType=jobacct_gather/none
JobCompType=jobcomp/filetxt
JobCompLoc=$D/jobcomp.txt
SchedulerParameters=bf_interval=2,sched_interval=2
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
GresTypes=gpu
ReturnToService=2
SlurmdTimeout=30
NodeName=n1 NodeHostname=$HOST NodeAddr=127.0.0.1 Port=$4 CPUs=2 RealMemory=8000 Gres=gpu:4
NodeName=n2 NodeHostname=$HOST NodeAddr=127.0.0.2 Port=$5 CPUs=2 RealMemory=8000 Gres=gpu:4
PartitionName=main Nodes=n[1-2] Default=YES MaxTime=INFINITE State=UP
C
echo "NodeName=n[1-2] Name=gpu File=$D/gpu[0-3]" > "$D/gres.conf"
munged --force --key-file="$D/munge/key" --socket="$S" --pid-file="$D/munge/munged.pid" \
  --log-file="$D/munge/log" --seed-file="$D/munge/seed"
slurmctld -f "$SLURM_CONF"
slurmd -f "$SLURM_CONF" -N n1
apart=(unshare --mount --pid --fork --kill-child=KILL --mount-proc)
if "${apart[@]}" true 2>/dev/null; then
  "${apart[@]}" sh -c "mount -t tmpfs none '$D/apart' && exec slurmd -D -f '$SLURM_CONF' -N n2" &
  touch "$D/apart/of-n1"
else
  slurmd -D -f "$SLURM_CONF" -N n2 &
fi
# The number in slurmd's own file is that of its namespace.
echo $! > "$D/n2.pid"
for _ in $(seq 300); do
  [ "$(sinfo -h -t idle -o %D 2>/dev/null)" = 2 ] && exit
  sleep 0.3
done
sinfo -N
exit 1
