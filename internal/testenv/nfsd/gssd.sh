# Runs in its own mount namespace, in the network and UTS namespaces of a node.
# Arguments: the directory of the realm, and that of the node's Kerberos files.
export KRB5_CONFIG=$1/krb5.conf
mkdir -p "$2/pipefs" "$2/tickets"
mount -t rpc_pipefs rpc_pipefs "$2/pipefs"
rpc.gssd -f -vvv -p "$2/pipefs" -k "$2/keytab" -d "$2/tickets" >>"$2/gssd.log" 2>&1 &
# The kernel regards gssd as running while this pipe is open.
until readlink /proc/$!/fd/* | grep '/gssd$' >&2; do
	kill -0 $!
	sleep 0.1
done
echo ready
wait
