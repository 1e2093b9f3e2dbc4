#!/bin/bash
# Runs a command in the VM of test/vm with an NFS server on the loopback, which
# exports a new xfs, at /srv, as its root; temporary files are on another disk.
#
#   test/vm/vm.sh --disk SIZE --disk SIZE -- test/bench/nfs.sh COMMAND [ARG]...
set -euo pipefail

mkfs.xfs -q /dev/vda
mkfs.xfs -q /dev/vdb
mount /dev/vda /mnt
mount /dev/vdb /srv
modprobe -a nfsd nfs nfsv4
mount -t nfsd nfsd /proc/fs/nfsd
exportfs -o rw,no_root_squash,fsid=0,insecure,no_subtree_check 127.0.0.1:/srv
rpc.nfsd -N 3 --no-udp 8
echo Y >/proc/fs/nfsd/v4_end_grace
rpc.mountd -N 2 -N 3 --no-udp
export TMPDIR=/mnt
exec "$@"
