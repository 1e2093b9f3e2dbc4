# shellcheck shell=bash
# Sourced in a guest. Starts a cluster of one node (test/e2e/cluster) in the directory /mnt,
# which must be on a disk, because containerd needs a filesystem that an overlay can use.
mount -t cgroup2 cgroup2 /sys/fs/cgroup
# All other processes are in one cgroup, so that the cgroup of the pods gets half of the time.
# In the root cgroup each of these processes would get as much as all pods together.
mkdir /sys/fs/cgroup/other
echo $$ >/sys/fs/cgroup/other/cgroup.procs

# Switching between threads and collecting garbage are slow here.
export GOMAXPROCS=1 GOGC=400
export APISERVER_ARGS="--enable-priority-and-fairness=false"
export KUBELET_ARGS="--housekeeping-interval=30s"
controllers=daemonset,deployment,replicaset,namespace,serviceaccount,root-ca-certificate-publisher,clusterrole-aggregation
controllers+=,node-lifecycle,taint-eviction,garbage-collector,disruption,persistentvolume-attach-detach,persistentvolume-binder
controllers+=,persistentvolume-expander,persistentvolume-protection,persistentvolumeclaim-protection
controllers+=,volumeattributesclass-protection
export KCM_ARGS="--controllers=${controllers//,/-controller,}-controller"
TRIVET_E2E_STATE=/mnt/cluster UNPACKED=1 INTERVAL=4 TIMEOUT=1800 ../e2e/cluster/up.sh || { tail -n 5 /mnt/cluster/log/*; exit 1; }
export TRIVET_E2E_STATE=/mnt/cluster
