# In a mount namespace of its own: what the daemons of NFS share, and the two
# that locks of NFSv3 need.
mount -t tmpfs run /run
mount -t tmpfs state /var/lib/nfs
mkdir -p /run/rpc_pipefs /run/sendsigs.omit.d /var/lib/nfs/{sm,sm.bak,nfsdcld}
touch /var/lib/nfs/{etab,rmtab}
chown -R statd /var/lib/nfs/{sm,sm.bak}
rpcbind -w
rpc.statd --no-notify
