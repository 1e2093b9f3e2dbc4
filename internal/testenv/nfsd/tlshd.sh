# Runs in its own mount namespace, in the network and UTS namespaces of a node or
# of a server. Arguments: the path of tlshd, its configuration, and its log.
"$1" -s -c "$2" >>"$3" 2>&1 &
# The kernel sends requests to the sockets of generic netlink (16) in the network
# namespace. The last digits of their port IDs are those of the process.
until awk -v pid=$! '$2 == 16 && $3 % 4194304 == pid' /proc/net/netlink | grep . >&2; do
	kill -0 $!
	sleep 0.1
done
echo ready
wait
