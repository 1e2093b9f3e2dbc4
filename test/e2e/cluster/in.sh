#!/usr/bin/env bash
# Runs a command inside: in.sh kubectl get nodes. With IN=2 it is in node 2, with its
# mounts and processes, else in node 1; ctr speaks to the node's containerd. With IN=0
# it is beside the control plane, where all processes are seen, and no node's mounts.
set -euo pipefail
. "$(dirname "$0")/env.sh"
find_state
n=${IN:-1}
# Else the command would run in the namespaces of whoever has the number now.
first=$(cat "$state/pid" 2>/dev/null) || fail "there is no cluster in $state"
runs "/proc/$first" control-plane.sh || fail "the cluster in $state has ended; down.sh removes what is left"
export KUBECONFIG=$state/admin.kubeconfig PATH=$bin:$PATH:/usr/sbin:/sbin
[ "$n" != 0 ] || exec nsenter -t "$first" -m -n -p --wd="$PWD" -- "$@"
# A number of the cluster's own pid namespace, so looked up in its own /proc.
node=$(cat "$state/n$n/pid" 2>/dev/null) || fail "there is no node $n in $state"
runs "/proc/$first/root/proc/$node" node.sh || fail "node $n in $state has ended"
exec nsenter -t "$first" -m -n -p -- nsenter -t "$node" -m -p --wd="$PWD" -- "$@"
