# In network, UTS and mount namespaces of its own. Arguments: hostname.
# A sysfs shows the network namespace that it was mounted in. Everything but
# this one mount is shared with the rest of the machine.
hostname "$1"
mount --make-private /sys
mount -t sysfs sysfs /sys
ip link set lo up
echo ready
exec sleep infinity >&2
