# Runs in its own mount namespace. Creates the directories that the NFS daemons
# share, and starts the two daemons that locks of NFSv3 need.
mount -t tmpfs run /run
mount -t tmpfs state /var/lib/nfs
mkdir -p /run/rpc_pipefs /run/sendsigs.omit.d /var/lib/nfs/{sm,sm.bak,nfsdcld}
touch /var/lib/nfs/{etab,rmtab}
chown -R statd /var/lib/nfs/{sm,sm.bak}
rpcbind -w
rpc.statd --no-notify
