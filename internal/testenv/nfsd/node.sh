# Runs in its own network, UTS and mount namespaces. Argument: hostname.
# A sysfs shows the network namespace in which it was mounted. All other
# mounts are shared with the rest of the machine.
hostname "$1"
mount --make-private /sys
mount -t sysfs sysfs /sys
ip link set lo up
echo ready
exec sleep infinity >&2
