# Runs after state.sh, in its own network namespace.
# Arguments: path of nfs.conf, lease time in seconds, "tracking" or "".
mount --bind "$1" /etc/nfs.conf
mount -t nfsd nfsd /proc/fs/nfsd
mount -t rpc_pipefs rpc_pipefs /run/rpc_pipefs
echo "$2" >/proc/fs/nfsd/nfsv4leasetime
echo "$2" >/proc/fs/nfsd/nfsv4gracetime
echo "$2" >/proc/sys/fs/nfs/nlm_grace_period
# nfsd looks for nfsdcld only when it starts.
[ -z "$3" ] || nfsdcld
rpc.mountd
ip link set lo up
echo ready
exec sleep infinity >&2
